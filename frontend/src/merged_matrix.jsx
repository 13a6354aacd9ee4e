// The merged mask as a matrix: drawn as on the first screen, one node marked; a click lets a position read another.

import { useComputed, useSignal, useSignalEffect } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import { drawMatrix } from "./draw.js";
import { geometry, image, palette } from "./picture.js";

export function MergedMatrix({ state }) {
  const canvas = useRef(null);
  const side = useSignal(0);
  const theme = useSignal(0);
  const picture = useComputed(() => {
    void theme.value;
    return state.reply.value && canvas.current ? image(state.reply.value.tile, palette(canvas.current)) : null;
  });
  const size = () => state.reply.value?.merged.length ?? 0;
  const worded = () => geometry(side.value, size(), null, true).words; // there is room for words on the axes
  const place = () => geometry(side.value, size(), null, worded());

  useEffect(() => {
    const box = canvas.current.parentElement;
    const observer = new ResizeObserver(() => (side.value = Math.floor(Math.min(box.clientWidth, box.clientHeight))));
    observer.observe(box);
    const scheme = matchMedia("(prefers-color-scheme: dark)");
    const repaint = () => theme.value++;
    scheme.addEventListener("change", repaint);
    document.addEventListener("themechange", repaint);
    return () => {
      observer.disconnect();
      scheme.removeEventListener("change", repaint);
      document.removeEventListener("themechange", repaint);
    };
  }, []);

  useSignalEffect(() => {
    const reply = state.reply.value;
    const element = canvas.current;
    const ratio = window.devicePixelRatio || 1;
    const pixels = Math.round(side.value * ratio);
    if (element.width !== pixels) [element.width, element.height] = [pixels, pixels];
    if (!reply || !pixels) return;
    const node = state.node.value;
    const context = element.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    drawMatrix(context, {
      at: place(),
      colours: (void theme.value, palette(element)),
      side: side.value,
      picture: picture.value,
      tile: reply.tile,
      size: size(),
      tokens: worded() ? reply.merged.map((cell) => cell.short) : [],
      field: node && { position: node.positions[0], runs: node.reads.map((i) => [i, i + 1, 1]) },
      lit: 1,
      path: state.leak.value?.witness ?? null,
      drag: null,
      cursor: node && { query: node.positions[0], key: node.positions[0] },
      tool: "look",
      focused: false,
      labelled: new Set(reply.nodes.flatMap(({ labels }) => labels.map(([position]) => position))),
      leaking: new Set(reply.leaks.map((leak) => leak.position)),
      dead: new Set(reply.dead),
    });
  });

  const pointed = (event) => {
    const box = canvas.current.getBoundingClientRect();
    return state.reply.value && place().at(event.clientX - box.left, event.clientY - box.top);
  };

  return (
    <div class="matrix">
      <canvas
        ref={canvas}
        role="img"
        aria-label={`Mask of the merged task, ${size()} positions; the row of the node that is looked at is marked`}
        style={{ width: `${side.value}px`, height: `${side.value}px` }}
        onPointerMove={(event) => {
          const at = pointed(event);
          state.hover.value = at ? state.reply.value.merged[at.query].node : null;
        }}
        onPointerLeave={() => (state.hover.value = null)}
        onClick={(event) => {
          const at = pointed(event);
          if (at) state.toggle(at.query, at.key);
        }}
      />
    </div>
  );
}
