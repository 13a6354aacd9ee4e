// The picture of a prompt: tokens across, layers up, lines as wide as what they carry, entries as marks.

import { useSignal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import { percent } from "./format.js";
import { signed } from "./model_charts.jsx";
import { endsOf, isLit, sameLine } from "./prompt.js";

const LEFT = 30; // of the numbers of layers
const BARS = 74; // what each layer adds at the token that answers
const ROOM = { top: 10, bottom: 34, column: 46, least: 34, fold: 15 };
const HIGH = 430;

/** What each line and entry says when it is pointed at. */
export function spoken(flow, item) {
  if (!item) return null;
  if (item.entry !== undefined) return `${item.name} at “${item.token}” (${item.position}): carries ${signed(item.carried)}, effect ${signed(item.effect)}${item.promotes ? `; promotes ${item.promotes}` : item.text ? `; ${item.text}` : ""}`;
  return `${item.name ?? `L${item.layer}H${item.head}`}: “${textOf(flow, item, "key")}” (${item.key}) → “${textOf(flow, item, "query")}” (${item.query}) carries ${signed(item.carried)}${item.weight === null || item.weight === undefined ? "" : `, weight ${percent(item.weight)}`}`;
}

export function textOf(flow, edge, end) {
  const isEncoder = edge.half === "encoder" || (edge.half === "cross" && end === "key");
  return (isEncoder ? flow.encoder_tokens : flow.tokens)[edge[end]];
}

/** The columns of a flow: all tokens where there is room; else those of the strongest lines, and folds of the others. */
function columnsOf(flow, edges, chosen, width) {
  const before = flow.encoder_tokens.length;
  const texts = [...flow.encoder_tokens, ...flow.tokens];
  const column = (item, end) => item[end] + (item.half === "encoder" || (item.half === "cross" && end === "key") ? 0 : before);
  const room = width - LEFT - BARS;
  const size = new Array(texts.length).fill(0);
  for (const edge of edges) for (const end of ["key", "query"]) size[column(edge, end)] += Math.abs(edge.carried ?? 0);
  if (flow.position !== null) size[before + flow.position] = Infinity;
  if (chosen) for (const end of chosen.entry === undefined ? ["key", "query"] : ["position"]) size[column(chosen, end)] = Infinity;
  const order = size.map((_, i) => i).sort((a, b) => size[b] - size[a]);
  let shown = new Set(order);
  for (let count = texts.length; count > 2; count--) {
    shown = new Set(order.slice(0, count));
    let folds = 0;
    for (let i = 0; i < texts.length; i++) if (!shown.has(i) && (i === 0 || shown.has(i - 1))) folds++;
    if (count * ROOM.least + folds * ROOM.fold <= room) break;
  }
  const cells = [];
  const of = [];
  for (let i = 0; i < texts.length; i++) {
    const last = cells.at(-1);
    if (shown.has(i)) cells.push({ first: i, last: i, text: texts[i] });
    else if (last?.isFold) last.last = i;
    else cells.push({ first: i, last: i, isFold: true });
    of[i] = cells.length - 1;
  }
  const folds = cells.filter((cell) => cell.isFold).length;
  const wide = Math.min(ROOM.column * 1.4, (room - folds * ROOM.fold) / Math.max(1, cells.length - folds));
  let x = LEFT;
  for (const cell of cells) {
    cell.width = cell.isFold ? ROOM.fold : wide;
    cell.x = x + cell.width / 2;
    x += cell.width;
  }
  return { cells, end: x, before, x: (item, end) => cells[of[column(item, end)]].x, at: (position) => cells[of[position + before]].x };
}

export function Flow({ pane, limit, most, onPick }) {
  const box = useRef(null);
  const width = useSignal(0);
  useEffect(() => {
    const observer = new ResizeObserver(([entry]) => (width.value = Math.floor(entry.contentRect.width)));
    observer.observe(box.current);
    return () => observer.disconnect();
  }, []);
  const flow = pane.flow.value.value;
  return <div class="flow-box" ref={box}>{width.value > 0 && flow && <Drawing pane={pane} flow={flow} limit={limit} most={most} width={width.value} onPick={onPick} />}</div>;
}

function Drawing({ pane, flow, limit, most, width, onPick }) {
  const chosen = pane.chosen.value;
  const edges = shownEdges(flow, limit, chosen);
  const place = columnsOf(flow, edges, chosen, width);
  const layers = flow.arrived.length - 1;
  const high = Math.max(240, Math.min(HIGH, 40 + layers * 40));
  const bottom = ROOM.top + high;
  const y = (layer) => bottom - (layer / layers) * high;
  const wide = (amount) => 0.6 + (11 * Math.min(1.5, Math.abs(amount ?? 0) / most)); // in proportion
  const step = Math.ceil(layers / 6);
  const heads = 1 + Math.max(0, ...flow.edges.map((edge) => edge.head));
  const lit = pane.lit.value;
  const ends = (edge) => [y(edge.layer + 0.04 + (0.3 * edge.head) / heads), y(edge.layer + 0.62 + (0.3 * edge.head) / heads)];
  const path = (edge) => {
    const [a, b] = [place.x(edge, "key"), place.x(edge, "query")];
    const bend = Math.min(26, Math.abs(b - a) * 0.12);
    const [from, to] = ends(edge);
    return a === b ? `M${a - 6},${from}C${a - 18},${to} ${a - 6},${to - 4} ${a},${to}` : `M${a},${from}C${a + (b - a) * 0.3},${from - bend} ${b - (b - a) * 0.3},${to - bend} ${b},${to}`;
  };
  const entries = flow.entries.slice(0, 30);
  const at = flow.position ?? null;
  return (
    <svg class="flow" width={width} height={bottom + ROOM.bottom} role="img" aria-label={`Flow of the answer ${flow.answer}: ${flow.tokens.length} tokens, ${layers} layers, the ${edges.length} strongest lines; the same as a table below`} onPointerLeave={() => (pane.hover.value = null)}>
      {Array.from({ length: layers }, (_, i) => i).filter((i) => i % step === 0 || i === layers - 1).filter((i, n, all) => n === all.length - 1 || all.at(-1) - i >= step / 2 ).map((i) => <g class="tick"><path d={`M${LEFT},${y(i + 0.5)}H${place.end}`} /><text x={LEFT - 6} y={y(i + 0.5) + 3.5} text-anchor="end">{i}</text></g>)}
      <text class="axis" transform={`translate(9 ${bottom}) rotate(-90)`}>layer →</text>
      {place.before > 0 && [["encoder", 0], ["decoder", place.before]].map(([half, first]) => <text class="axis" x={place.at(first - place.before)} y={ROOM.top - 1} text-anchor="middle">{half}</text>)}
      {place.cells.map((cell) => <Stream cell={cell} flow={flow} place={place} y={y} wide={wide} layers={layers} />)}
      {edges.map((edge) => {
        const looked = sameLine(edge, chosen);
        return (
          <g key={`${edge.half}${edge.name}.${edge.query}.${edge.key}`} class={`line ${edge.carried < 0 ? "against" : "for"}${looked ? " chosen" : ""}${isLit(edge, lit) ? " lit" : ""}`} data-line={`${edge.name} ${edge.query} ${edge.key}`} onPointerEnter={() => (pane.hover.value = edge)} onClick={() => onPick(edge)}>
            <title>{spoken(flow, edge)}</title>
            <path class="reach" d={path(edge)} />
            <path d={path(edge)} stroke-width={wide(edge.carried)} />
            {looked && <><circle cx={place.x(edge, "key")} cy={ends(edge)[0]} r="4.5" /><circle cx={place.x(edge, "query")} cy={ends(edge)[1]} r="4.5" /></>}
          </g>
        );
      })}
      {entries.map((entry) => {
        const [cx, cy] = [place.x(entry, "position"), y(entry.layer + 0.85)];
        const r = 2.2 + 0.45 * wide(entry.carried);
        return (
          <path key={`${entry.name}.${entry.position}.${entry.half}`} class={`entry ${entry.carried < 0 ? "against" : "for"}${sameLine(entry, chosen) ? " chosen" : ""}${isLit(entry, lit) ? " lit" : ""}`} data-entry={entry.name} d={`M${cx},${cy - r}L${cx + r},${cy}L${cx},${cy + r}L${cx - r},${cy}Z`} onPointerEnter={() => (pane.hover.value = entry)} onClick={() => onPick(entry)}>
            <title>{spoken(flow, entry)}</title>
          </path>
        );
      })}
      {place.cells.map((cell, i) => <TokenCell key={i} cell={cell} pane={pane} flow={flow} place={place} y={bottom + 6} />)}
      {at !== null && <Gains flow={flow} at={at} x={place.end + 34} y={y} layers={layers} />}
    </svg>
  );
}

/** The strongest lines, and the chosen one if it is not among them; the chosen one last, above the others. */
export function shownEdges(flow, limit, chosen) {
  const edges = flow.edges.slice(0, limit);
  const line = chosen && chosen.entry === undefined ? flow.edges.find((edge) => sameLine(edge, chosen)) : null;
  return [...edges.filter((edge) => edge !== line).reverse(), ...(line ? [line] : [])];
}

/** What stays at a token from layer to layer. */
function Stream({ cell, flow, place, y, wide, layers }) {
  const position = cell.first - place.before;
  if (cell.isFold || position < 0) return <path class="stream" d={`M${cell.x},${y(0)}V${y(layers)}`} stroke-width="1" />;
  return Array.from({ length: layers }, (_, layer) => {
    const amount = flow.arrived[layer + 1][position];
    return <path class={`stream ${amount < 0 ? "against" : "for"}`} d={`M${cell.x},${y(layer)}V${y(layer + 1)}`} stroke-width={wide(amount) * 0.6} />;
  });
}

function TokenCell({ cell, pane, flow, place, y }) {
  if (cell.isFold) return <text class="fold" x={cell.x} y={y + 14} text-anchor="middle"><title>{`tokens ${cell.first} to ${cell.last} send or get little`}</title>…</text>;
  const isOwn = cell.first >= place.before;
  const position = isOwn ? cell.first - place.before : cell.first;
  const [lit, chosen] = [pane.lit.value, pane.chosen.value];
  const line = lit && (lit.at !== undefined || lit.entry !== undefined || lit.query !== undefined) ? lit : chosen;
  const marked = line && endsOf(line).some(([isEncoder, at]) => isEncoder !== isOwn && at === position);
  const cannot = isOwn && flow.reach.length > 0 && flow.reach[position] < 0;
  const most = Math.floor((cell.width - 6) / 6.6);
  const text = cell.text.length > most ? `${cell.text.slice(0, Math.max(1, most - 1))}…` : cell.text;
  return (
    <g class={`token-cell${isOwn && position === flow.position ? " answers" : ""}${marked ? " marked" : ""}${cannot ? " cannot" : ""}`} onPointerEnter={() => (pane.hover.value = { at: position, half: isOwn ? "" : "encoder" })} onClick={isOwn ? () => pane.change({ position }) : undefined}>
      <title>{`${cell.text} (${position})${cannot ? ": may not reach the answer" : ""}${isOwn ? ". Click: what comes after it" : " of the encoder"}`}</title>
      <rect x={cell.x - cell.width / 2 + 1} y={y} width={cell.width - 2} height="22" rx="3" />
      <text x={cell.x} y={y + 15} text-anchor="middle">{text}</text>
    </g>
  );
}

/** What each layer adds at the token that answers, as bars. */
function Gains({ flow, at, x, y, layers }) {
  const gains = Array.from({ length: layers }, (_, layer) => flow.arrived[layer + 1][at] - flow.arrived[layer][at]);
  const largest = Math.max(...gains.map(Math.abs)) || 1;
  const high = Math.max(1.5, Math.min(9, (y(0) - y(1)) * 0.6));
  return (
    <g class="gains">
      <path class="zero" d={`M${x},${y(0)}V${y(layers)}`} />
      {gains.map((gain, layer) => (
        <rect class={gain < 0 ? "against" : "for"} x={gain < 0 ? x + (28 * gain) / largest : x} y={y(layer + 0.5) - high / 2} width={(28 * Math.abs(gain)) / largest} height={high}>
          <title>{`layer ${layer} adds ${signed(gain)} at “${flow.tokens[at]}”`}</title>
        </rect>
      ))}
      <text x={x} y={y(0) + 16} text-anchor="middle">each layer</text>
      <text x={x} y={y(0) + 28} text-anchor="middle">adds</text>
    </g>
  );
}
