"""Solutions of the exercises of 01_two_graphs_by_hand.ipynb; the tests run them."""

import pcg_ref as pcg


def submit(graph, static_x, x):
    n = x.shape[0]
    static_x[:n].copy_(x)
    graph.replay()
    return graph.output[:n].clone()


def bridged(step):
    bridge = None

    def fixed(h, lengths):
        nonlocal bridge
        result = step(h, lengths)
        if bridge is None:
            bridge = result.clone()
        return bridge.copy_(result)

    return fixed


def build(parts, step, static_x, pool):
    first, *others = parts
    first(static_x)
    graphs = [pcg.capture(first, static_x, pool=pool)]
    bridges = []
    for part in others:
        bridges.append(static_x.new_zeros(static_x.shape))
        part(bridges[-1])
        graphs.append(pcg.capture(part, bridges[-1], pool=pool))

    def run(x, lengths):
        n = x.shape[0]
        static_x[:n].copy_(x)
        graphs[0].replay()
        for before, bridge, after in zip(graphs, bridges, graphs[1:]):
            step(before.output, lengths, bridge)
            after.replay()
        return graphs[-1].output[:n].clone()

    return run
