// The matrix: a row for each query, a column for each key. Drawn on a canvas; pointed at, painted and walked by keys.

import { useComputed, useSignal, useSignalEffect } from "@preact/signals";
import { useEffect, useMemo, useRef } from "preact/hooks";
import { drawMatrix } from "./draw.js";
import { grouped } from "./format.js";
import { geometry, painter, palette } from "./picture.js";

export function Matrix({ studio }) {
  const canvas = useRef(null);
  const side = useSignal(0);
  const theme = useSignal(0);
  const drag = useSignal(null);
  const focused = useSignal(false);
  const marks = useComputed(() => marksOf(studio));
  const draw = useMemo(painter, []);
  const considered = () => studio.preview.value.value;
  const stranger = () => (considered() && considered().size !== studio.size.value ? considered() : null); // of another size: shown alone
  const place = () =>
    stranger() ? geometry(side.value, stranger().size, null, false) : geometry(side.value, studio.size.value, studio.window.value, studio.view.value?.tokens.length > 0);

  useEffect(() => {
    const box = canvas.current.parentElement;
    const measure = () => (side.value = Math.floor(Math.min(box.clientWidth, box.clientHeight || box.clientWidth)));
    const observer = new ResizeObserver(measure);
    observer.observe(box);
    measure();
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
    const view = studio.view.value;
    if (!view || !side.value) return;
    const ratio = window.devicePixelRatio || 1;
    const element = canvas.current;
    const pixels = Math.round(side.value * ratio);
    if (element.width !== pixels) [element.width, element.height] = [pixels, pixels];
    const context = element.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    const colours = (void theme.value, palette(element));
    const tile = considered()?.tile ?? studio.tile.value;
    const canvasOf = { at: place(), colours, side: side.value, picture: tile && draw(tile, colours), tile };
    if (stranger()) return drawMatrix(context, { ...canvasOf, ...ALONE, size: stranger().size });
    drawMatrix(context, {
      ...canvasOf,
      size: view.size,
      tokens: view.tokens,
      field: studio.field.value,
      lit: studio.lit.value,
      path: studio.path.value,
      drag: drag.value,
      cursor: studio.cursor.value,
      tool: studio.tool.value,
      focused: focused.value,
      ...marks.value,
    });
  });

  const pointed = (event) => {
    if (stranger()) return null;
    const box = canvas.current.getBoundingClientRect();
    return place().at(event.clientX - box.left, event.clientY - box.top);
  };

  const paint = (area, start) => {
    const strokes = [[area.query, area.lastQuery, area.key, area.lastKey, studio.tool.value === "allow" ? 1 : 0]];
    return studio.act("paint", { layer: studio.layer.value, strokes }, start);
  };

  const handlers = {
    onPointerMove(event) {
      const at = pointed(event);
      if (drag.value) {
        if (at) drag.value = areaOf(drag.value.from, at, studio);
      } else if (at && !studio.pinned.value) studio.point(at);
    },
    onPointerDown(event) {
      const at = pointed(event);
      if (!at || event.button) return;
      if (studio.tool.value === "look") {
        studio.point(at);
        const leaks = studio.answers.leaks.value.value?.leaks ?? [];
        const leak = leaks.findIndex(({ position, token, carrier }) => position === at.query && (at.key === carrier || at.key === token));
        if (leak >= 0 && studio.leak.value !== leak) studio.showLeak(leak);
        studio.pinned.value = event.pointerType === "mouse" ? !studio.pinned.value : false;
        return;
      }
      canvas.current.setPointerCapture(event.pointerId);
      drag.value = areaOf(at, at, studio);
    },
    onPointerUp(event) {
      const area = drag.value;
      drag.value = null;
      if (area) paint(area, event.timeStamp);
    },
    onPointerCancel: () => (drag.value = null),
    onPointerLeave: () => !studio.pinned.value && !drag.value && !focused.value && studio.point(null),
    onFocus() {
      focused.value = canvas.current.matches(":focus-visible");
      if (focused.value && !studio.cursor.value) studio.point({ query: 0, key: 0 });
    },
    onBlur: () => (focused.value = false),
    onKeyDown(event) {
      if (event.ctrlKey || event.metaKey || event.altKey || stranger()) return;
      const n = studio.size.value;
      const here = studio.cursor.value ?? { query: 0, key: 0 };
      const far = event.shiftKey ? 8 : 1;
      const move = {
        ArrowUp: [-far, 0],
        ArrowDown: [far, 0],
        ArrowLeft: [0, -far],
        ArrowRight: [0, far],
        Home: [0, -n],
        End: [0, n],
        PageUp: [-n, 0],
        PageDown: [n, 0],
      }[event.key];
      if (move) {
        const clip = (value) => Math.max(0, Math.min(n - 1, value));
        const next = { query: clip(here.query + move[0]), key: clip(here.key + move[1]) };
        focused.value = true;
        studio.point(next);
        studio.reveal(next);
      } else if (event.key === "Enter" || event.key === " ") {
        if (studio.tool.value === "look") studio.pinned.value = !studio.pinned.value;
        else paint(areaOf(here, here, studio), event.timeStamp);
      } else if (event.key === "+" || event.key === "=") studio.zoom(0.5, here);
      else if (event.key === "-") studio.zoom(2, here);
      else if (event.key === "0") studio.zoom(Infinity);
      else if (event.key === "Escape") {
        studio.pinned.value = false;
        studio.point(null);
      } else return;
      event.preventDefault();
    },
  };

  useEffect(() => {
    const element = canvas.current;
    const wheel = (event) => {
      if (!event.ctrlKey && element.getRootNode().activeElement !== element) return; // a page is scrolled by its wheel
      event.preventDefault();
      studio.zoom(event.deltaY > 0 ? 1.25 : 0.8, pointed(event));
    };
    element.addEventListener("wheel", wheel, { passive: false });
    return () => element.removeEventListener("wheel", wheel);
  }, []);

  const size = studio.size.value;
  const at = place();
  return (
    <div class="matrix">
      <canvas
        ref={canvas}
        tabIndex={0}
        role="application"
        aria-label={`Mask of ${grouped(size)} positions. Rows are queries, columns are keys. Arrow keys move, Enter ${studio.tool.value === "look" ? "holds a row" : "paints"}, plus and minus zoom.`}
        aria-describedby="readout"
        data-place={JSON.stringify([at.left, at.top, at.cell, at.query, at.key])}
        class={studio.tool.value === "look" ? "looks" : "paints"}
        style={{ width: `${side.value}px`, height: `${side.value}px` }}
        {...handlers}
      />
    </div>
  );
}

const ALONE = { tokens: [], field: null, path: null, drag: null, cursor: null, labelled: new Set(), leaking: new Set(), dead: new Set() };

/** The rectangle between two places, in whole blocks of the brush. */
function areaOf(from, to, studio) {
  const [block, n] = [studio.brush.value, studio.size.value];
  const low = (a, b) => Math.floor(Math.min(a, b) / block) * block;
  const high = (a, b) => Math.min(n, (Math.floor(Math.max(a, b) / block) + 1) * block);
  return {
    from,
    query: low(from.query, to.query),
    lastQuery: high(from.query, to.query),
    key: low(from.key, to.key),
    lastKey: high(from.key, to.key),
  };
}

function marksOf(studio) {
  const view = studio.view.value;
  const leaks = studio.answers.leaks.value.value;
  return {
    labelled: new Set(view?.labels.map(([position]) => position)),
    leaking: new Set(leaks?.leaks.map((leak) => leak.position)),
    dead: new Set(leaks?.dead),
  };
}
