"""Compare attention patterns by what they let flow, then keep the flow of one with far fewer pairs."""

import attnflow as af

n = 1024
causal = af.masks.causal(n)
candidates = {
    "causal": causal,
    "window of 64": af.masks.sliding_window(n, 64),
    "window of 64 and 4 sinks": af.masks.attention_sink(n, sinks=4, window=64),
    "window of 8, dilated to 128": af.masks.dilated_window(n, 32, dilation=4) | af.masks.sliding_window(n, 8),
    "longformer, token 0 global": af.masks.longformer(n, 64, [0]),
    "the same, made causal": af.masks.longformer(n, 64, [0]) & causal,
}
print(f"{'mask':<28} {'density':>8} {'classes':>8} {'depth':>6}")
for name, mask in candidates.items():
    flow = af.order.analyze(mask)
    print(f"{name:<28} {mask.density:8.4f} {len(flow.classes):8} {flow.depth:6}")
print("(one class: every position reads every other one, so nothing could be trained to predict the next token)")

# Where is the oldest token's information after each layer, on its way to the newest?
flow = af.order.analyze(af.masks.sliding_window(n, 128))
print("\nfrom token 0 to the last one, a position per layer:", flow.path(0, n - 1))
print("after 4 layers the last token has read", len(flow.receptive_field(n - 1, layers=4)), "tokens")

# The same order with fewer pairs costs layers; a window and a few anchors buy them back.
for window, anchors in ((None, None), (32, None), (32, 16)):
    sparse = af.order.analyze(causal).sparsify(window=window, anchors=anchors)
    print(f"causal with window={window}, anchors={anchors}: density {sparse.mask.density:.4f}, {sparse.depth} layers")
