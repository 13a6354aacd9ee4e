// The Hasse diagram beside the matrix: boxes and lines where the server has put them.

import { useSignal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import { grouped } from "./format.js";
import { Save } from "./save.jsx";

const MARGIN = 12;
const LEAST = 0.62; // of the size at which the server sets its texts

export function Hasse({ studio }) {
  const diagram = studio.answers.diagram.value;
  const content = diagram.value;
  if (!content) return <div class="hasse empty" aria-busy={!diagram.error}>{diagram.error || ""}</div>;
  return (
    <figure class="hasse" data-saved>
      <Fitted content={content} here={boxHere(studio, content)}>
        {(scale) => <Boxes studio={studio} content={content} scale={scale} />}
      </Fitted>
      <figcaption><span>{diagram.error || content.caption || "Boxes: classes. Lines: covers. Flow: up."}</span> <Save name="hasse diagram" /></figcaption>
    </figure>
  );
}

/** The diagram as large as fits, but never too small to read: then it scrolls, and follows the pointer's box. */
function Fitted({ content, here, children }) {
  const box = useRef(null);
  const room = useSignal([0, 0]);
  useEffect(() => {
    const observer = new ResizeObserver(([entry]) => (room.value = [entry.contentRect.width, entry.contentRect.height]));
    observer.observe(box.current);
    return () => observer.disconnect();
  }, []);
  const [width, height] = room.value;
  const fit = Math.min(width / (content.width + 2 * MARGIN), height / (content.height + 2 * MARGIN));
  const scale = Math.max(LEAST, Math.min(1.25, fit));
  useEffect(() => {
    const at = here === undefined || here === null ? null : content.boxes[here];
    if (!at || scale <= fit) return;
    const view = box.current;
    const [x, y] = [(at.x + MARGIN) * scale, (at.y + MARGIN) * scale];
    if (y < view.scrollTop + 20 || y > view.scrollTop + view.clientHeight - 20) view.scrollTop = y - view.clientHeight / 2;
    if (x < view.scrollLeft + 40 || x > view.scrollLeft + view.clientWidth - 40) view.scrollLeft = x - view.clientWidth / 2;
  }, [here, content, scale]);
  return <div class="fitted" ref={box} tabIndex={0} role="region" aria-label="Hasse diagram">{children(scale)}</div>;
}

const boxHere = (studio, content) => studio.cursor.value && content.box_of?.[studio.cursor.value.query];

function Boxes({ studio, content, scale }) {
  const lit = litBoxes(studio, content);
  const way = (studio.path.value ?? []).map((position) => content.box_of?.[position]);
  const here = boxHere(studio, content);
  const [width, height] = [content.width + 2 * MARGIN, content.height + 2 * MARGIN];
  const moves = new Set(way.slice(1).map((box, i) => `${way[i]}-${box}`));
  return (
    <svg
      viewBox={`${-MARGIN} ${-MARGIN} ${width} ${height}`}
      width={width * scale}
      height={height * scale}
      role="img"
      aria-label={`Hasse diagram: ${grouped(content.boxes.length)} boxes, ${grouped(content.lines.length)} lines; information flows upwards`}
    >
      {content.lines.map((line) => (
        <g class={moves.has(`${line.lower}-${line.upper}`) ? "line leak" : lit?.has(line.lower) && lit.has(line.upper) ? "line lit" : "line"}>
          <path d={line.path} stroke-width={1.1 + 0.8 * Math.log10(line.count)} />
          <path class="head" d={`M${line.end[0] - 3.5},${line.end[1] + 7}L${line.end[0]},${line.end[1]}L${line.end[0] + 3.5},${line.end[1] + 7}Z`} />
        </g>
      ))}
      {way.slice(1).map((box, i) => <Jump from={content.boxes[way[i]]} to={content.boxes[box]} drawn={content.lines.some((l) => l.lower === way[i] && l.upper === box)} />)}
      {content.boxes.map((box, i) => (
        <g class={`node${box.several ? " several" : ""}${lit?.has(i) ? " lit" : ""}${way.includes(i) ? " leak" : ""}${here === i ? " here" : ""}${studio.pick && content.box_of ? " picks" : ""}`} onPointerEnter={() => studio.look?.(content.box_of?.indexOf(i) ?? -1)} onPointerLeave={() => studio.look?.(-1)} onClick={() => studio.pick?.(content.box_of?.indexOf(i) ?? -1)}>
          <title>{box.texts[2]}</title>
          {box.several && <rect class="behind" x={box.x - box.width / 2 + 4} y={box.y - box.height / 2 - 4} width={box.width} height={box.height} rx="6" />}
          <rect x={box.x - box.width / 2} y={box.y - box.height / 2} width={box.width} height={box.height} rx="6" />
          <text x={box.x} y={box.texts[1] ? box.y - 3 : box.y + 4.3}>{box.texts[0]}</text>
          {box.texts[1] && <text class="second" x={box.x} y={box.y + 12}>{box.texts[1]}</text>}
        </g>
      ))}
    </svg>
  );
}

/** A move of a leak that passes several covers in one layer, for which the diagram has no line. */
function Jump({ from, to, drawn }) {
  if (drawn || !from || !to || from === to) return null;
  const [a, b] = [from.y - from.height / 2, to.y + to.height / 2];
  const bend = Math.max(24, Math.abs(to.x - from.x) / 3 + 18);
  return <path class="jump" d={`M${from.x},${a}C${from.x + bend},${a - bend} ${to.x + bend},${b + bend} ${to.x},${b}`} />;
}

/** Boxes whose positions the one under the pointer has read after as many layers as the slider says. */
function litBoxes(studio, content) {
  const field = studio.field.value;
  if (!field || !content.box_of) return null;
  const boxes = new Set();
  for (const [first, last, layer] of field.runs)
    if (layer <= studio.lit.value) for (let i = first; i < last; i++) boxes.add(content.box_of[i]);
  return boxes;
}
