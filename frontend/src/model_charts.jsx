// Drawings of what the server says of a model: the map of an audit, a plane of layers, a map of numbers.

import { useSignal } from "@preact/signals";
import { Save } from "./save.jsx";

export const signed = (value) => (value === null || value === undefined ? "–" : `${value < 0 ? "−" : "+"}${Math.abs(value).toPrecision(3)}`);

/** The same with as many digits after the point in every row of a column, so that digits align. */
export const fixed = (value, digits = 2) => (value === null || value === undefined ? "–" : `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(digits)}`);

const LOOKS = { clean: "clean", breaks: "breaks the order", carries: "carries a break on" };

/** Watched modules in columns, layers that are alike in a row, from below; where a flow against the order starts is marked. */
export function AuditMap({ value, first, module }) {
  return (
    <div class="audit-map" data-saved>
      <Save name="audit map" isTable rows={() => [["stack", "layers", "module", "status"], ...value.strips.flatMap((strip) => strip.rows.flatMap((row) => row.cells.flatMap((status, i) => (status ? [[strip.stack, row.name, strip.names[i], status]] : []))))]} />
      {value.strips.map((strip) => (
        <div class="scroll" key={strip.stack} tabIndex={0} role="region" aria-label={`Modules of ${strip.stack}`}>
          <table>
            <caption>{strip.stack}</caption>
            <thead><tr><td />{strip.names.map((name) => <th scope="col"><span>{name}</span></th>)}</tr></thead>
            <tbody>
              {[...strip.rows].reverse().map((row) => (
                <tr key={row.name}>
                  <th scope="row" class="n">{row.name}</th>
                  {row.cells.map((status, i) => (
                    <td>
                      {status && <Module status={status} name={strip.names[i]} isFirst={isFirst(first, strip, row, i)} path={pathOf(strip, row, i)} module={module} />}
                    </td>
                  ))}
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      ))}
      <p class="legend"><span class="module clean" /> clean <span class="module breaks">!</span> breaks the order <span class="module carries" /> carries a break on <span class="aside n">{value.watched} modules</span></p>
    </div>
  );
}

/** A cell of the map; where a leak starts it is clicked to see that leak alone in the table. */
function Module({ status, name, isFirst, path, module }) {
  const look = `module ${status}${isFirst ? " first" : ""}${module.value === path ? " lit" : ""}`;
  const content = <>{status === "breaks" ? "!" : ""}<span class="sr">{LOOKS[status]}</span></>;
  if (status !== "breaks") return <span class={look} title={`${name}: ${LOOKS[status]}`}>{content}</span>;
  return <button type="button" class={look} title={`${name}: ${LOOKS[status]}`} aria-pressed={module.value === path} onClick={() => (module.value = module.value === path ? null : path)}>{content}</button>;
}

const pathOf = (strip, row, i) => {
  const layer = /^layer (\d+)$/.exec(row.name)?.[1];
  const within = layer === undefined ? strip.names[i] : `${strip.stack}.${layer}.${strip.names[i]}`;
  return strip.names[i] === "(layer)" ? `${strip.stack}.${layer}` : within;
};

/** Whether a cell is the first module that moves: the server's name of it ends in the name of the column. */
function isFirst(first, strip, row, i) {
  if (!first || row.cells[i] !== "breaks") return false;
  const path = first.layer === null ? strip.names[i] : `${strip.stack}.${first.layer}.${strip.names[i]}`;
  return first.module === path || (strip.names[i] === "(layer)" && first.module === `${strip.stack}.${first.layer}`);
}

const minus = (tick) => `${tick}`.replace("-", "−");
const SIDE = { width: 380, height: 300, left: 52, right: 12, top: 12, bottom: 40 };

/** Symmetry against directionality, a dot for each layer with its number; the cross holds the quartiles. */
export function Plane({ stack }) {
  const pointed = useSignal(null);
  const points = stack.points.filter((point) => point.symmetry !== null && point.directionality !== null);
  if (!points.length) return <p class="quiet">No layer has a symmetry.</p>;
  const bands = stack.chance ?? { symmetry: [0, 0], directionality: [0, 0] };
  const x = scale(points.map((point) => point.symmetry).concat(bands.symmetry), SIDE.left, SIDE.width - SIDE.right);
  const y = scale(points.map((point) => point.directionality).concat(bands.directionality), SIDE.height - SIDE.bottom, SIDE.top);
  const [s, d] = [stack.quartiles.symmetry.map(x.at), stack.quartiles.directionality.map(y.at)];
  const last = Math.max(1, points.length - 1);
  const here = pointed.value === null ? null : points[pointed.value];
  const named = apart(points.map((point) => [x.at(point.symmetry) + 6, y.at(point.directionality) - 4]));
  return (
    <figure class="chart" data-saved>
      <figcaption>Symmetry and directionality <Save name="geometry of layers" rows={() => [["layer", "symmetry", "directionality"], ...points.map((point) => [point.layer, point.symmetry, point.directionality])]} /></figcaption>
      <svg viewBox={`0 0 ${SIDE.width} ${SIDE.height}`} role="img" aria-label={`Symmetry against directionality of ${points.length} layers`}>
        <rect class="chance" x={x.at(bands.symmetry[0])} y={SIDE.top} width={Math.max(0, x.at(bands.symmetry[1]) - x.at(bands.symmetry[0]))} height={SIDE.height - SIDE.top - SIDE.bottom} />
        <rect class="chance" x={SIDE.left} y={y.at(bands.directionality[1])} width={SIDE.width - SIDE.left - SIDE.right} height={Math.max(0, y.at(bands.directionality[0]) - y.at(bands.directionality[1]))} />
        {x.ticks.map((tick) => <g class="tick"><path d={`M${x.at(tick)},${SIDE.top}V${SIDE.height - SIDE.bottom}`} /><text x={x.at(tick)} y={SIDE.height - SIDE.bottom + 14} text-anchor="middle">{minus(tick)}</text></g>)}
        {y.ticks.map((tick) => <g class="tick"><path d={`M${SIDE.left},${y.at(tick)}H${SIDE.width - SIDE.right}`} /><text x={SIDE.left - 6} y={y.at(tick) + 3.5} text-anchor="end">{minus(tick)}</text></g>)}
        <text class="axis" x={(SIDE.left + SIDE.width) / 2} y={SIDE.height - 6} text-anchor="middle">symmetry</text>
        <text class="axis" transform={`translate(12 ${SIDE.height / 2}) rotate(-90)`} text-anchor="middle">directionality</text>
        {points.map((point, i) => (
          <g class="point" onPointerEnter={() => (pointed.value = i)} onPointerLeave={() => (pointed.value = null)}>
            <circle cx={x.at(point.symmetry)} cy={y.at(point.directionality)} r={pointed.value === i ? 6 : 4} fill-opacity={0.25 + (0.75 * i) / last} />
            {(named.has(i) || pointed.value === i) && <text x={x.at(point.symmetry) + 6} y={y.at(point.directionality) - 4}>{point.layer}</text>}
          </g>
        ))}
        <path class="quartiles" d={`M${s[0]},${d[1]}H${s[2]}M${s[1]},${d[0]}V${d[2]}`} />
      </svg>
      <p class="readout n">{here ? `layer ${here.layer}: symmetry ${signed(here.symmetry)}, directionality ${signed(here.directionality)}` : "Dots are layers, later ones darker; the cross holds the quartiles."}</p>
    </figure>
  );
}

/** Which of these places can have a number beside them without covering another: the first and the last, and what is free. */
function apart(places) {
  const order = [places.length - 1, ...places.keys()];
  const taken = [];
  const free = ([x, y]) => taken.every(([a, b]) => Math.abs(x - a) > 16 || Math.abs(y - b) > 10);
  return new Set(order.filter((i) => free(places[i]) && taken.push(places[i])));
}

/** A linear scale with round ticks. */
function scale(values, from, to) {
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const room = (high - low || 1) * 0.08;
  const [a, b] = [low - room, high + room];
  const rough = (b - a) / 5;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((each) => each * power >= rough);
  const ticks = [];
  for (let i = Math.ceil(a / step); i * step <= b; i++) ticks.push(Number((i * step).toPrecision(6)));
  return { at: (value) => from + ((value - a) / (b - a)) * (to - from), ticks };
}

const WIDEST = 720;

/** Numbers as colours, the first row at the top, but layers go up: blue where positive, orange where negative; `onPick(row, column)` takes a click. */
export function HeatMap({ title, values, sides, columns, x, y, row = null, column = null, onPick = null, words = signed, full = null }) {
  const pointed = useSignal(null);
  const { limit, largest } = full ? { limit: full, largest: reach(values).largest } : reach(values);
  const cell = Math.max(4, Math.min(18, Math.floor(WIDEST / columns.length)));
  const high = Math.max(8, Math.min(18, Math.floor(420 / values.length)));
  const left = 24 + 6.4 * Math.min(16, Math.max(...sides.map((side) => side.length)));
  const named = cell >= 11 && columns.some((name) => !name.startsWith("head "));
  const top = (named ? 8 + 6.4 * Math.min(12, Math.max(...columns.map((name) => name.length))) : 18) + 14;
  const step = Math.ceil(11 / high);
  const here = pointed.value;
  const [wide, tall] = [cell * columns.length, high * values.length];
  const up = y === "layer";
  const yOf = (r) => top + high * (up ? values.length - 1 - r : r);
  return (
    <figure class={onPick ? "chart heat picks" : "chart heat"} data-saved>
      <figcaption>{title} <Save name={title} rows={() => [[y, ...columns], ...values.map((cells, r) => [sides[r], ...cells])]} /></figcaption>
      <div class="scroll" tabIndex={0} role="region" aria-label={title}>
        <svg width={Math.max(left + wide, left + 6 * x.length) + 4} height={Math.max(top + tall, top + 6 * y.length) + 4} role="img" aria-label={`${title}: ${values.length} rows (${y}), ${columns.length} columns (${x}), largest size ${largest.toPrecision(3)}`} onPointerLeave={() => (pointed.value = null)}>
          <text class="axis" x={left} y={11}>{x} →</text>
          <text class="axis" transform={`translate(11 ${top}) rotate(-90)`} text-anchor="end">{up ? `${y} →` : `← ${y}`}</text>
          {columns.map((name, i) => (named ? <text class="tick" transform={`translate(${left + (i + 0.5) * cell + 3.5} ${top - 4}) rotate(-90)`}>{clipped(name, 12)}</text> : i % Math.ceil(28 / cell) === 0 && <text class="tick" x={left + (i + 0.5) * cell} y={top - 5} text-anchor="middle">{i}</text>))}
          {values.map((cells, r) => (
            <g>
              {r % step === 0 && <text class="tick" x={left - 5} y={yOf(r) + 0.5 * high + 3.5} text-anchor="end">{clipped(sides[r], 16)}</text>}
              {cells.map((value, c) => (
                <rect x={left + c * cell} y={yOf(r)} width={cell - 0.6} height={high - 0.6} class={value === null ? "void" : value < 0 ? "minus" : "plus"} fill-opacity={value === null ? 1 : limit ? Math.max(0.03, Math.min(1, Math.abs(value) / limit)) : 0.03} onPointerEnter={() => (pointed.value = [r, c])} onClick={onPick && value !== null ? () => onPick(r, c) : undefined} />
              ))}
            </g>
          ))}
          {column !== null && <rect class="chosen" x={left + column * cell - 0.8} y={(row === null ? top : yOf(row)) - 0.8} width={cell + 1} height={(row === null ? tall : high) + 1} />}
        </svg>
      </div>
      <p class="readout n">{here ? `${sides[here[0]]}, ${columns[here[1]]}: ${words(values[here[0]][here[1]])}` : full ? `Full colour is ${words(full)}; the largest is ${words(largest)}.` : `Largest size ${largest.toPrecision(3)}${limit < largest ? `; colours end at ${limit.toPrecision(3)}, which 99 of 100 stay below` : ""}. Blue is positive, orange negative.`}</p>
    </figure>
  );
}

/** Up to which size colours grow: one cell far beyond the others would leave these all pale. */
function reach(values) {
  const sizes = values.flat().filter((value) => value !== null).map(Math.abs).sort((a, b) => a - b);
  const largest = sizes.at(-1) ?? 0;
  return { largest, limit: sizes[Math.floor(0.99 * (sizes.length - 1))] || largest };
}

const clipped = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

/** A signed number as a bar from the middle of its cell, so that a column of them is read at a glance. */
export function Bar({ value, limit }) {
  const share = limit ? Math.min(1, Math.abs(value ?? 0) / limit) : 0;
  return (
    <svg class="bar" viewBox="-50 0 100 10" width="100" height="10" aria-hidden="true">
      <path d="M0,0V10" />
      <rect class={value < 0 ? "minus" : "plus"} x={value < 0 ? -50 * share : 0} y="1.5" width={50 * share} height="7" />
    </svg>
  );
}

/** Tokens as buttons, coloured by a number; the chosen one is pressed. */
export function Tokens({ label, tokens, values = null, chosen = null, disabled = false, onPick, words = signed, full = null }) {
  const limit = full ?? (values ? Math.max(...values.map((value) => Math.abs(value ?? 0))) : 0);
  return (
    <div class="strip pick" role="group" aria-label={label}>
      {tokens.map((token, i) => (
        <Token key={i} text={token} value={values?.[i] ?? null} limit={limit} pressed={i === chosen} disabled={disabled} title={`position ${i}${values ? `: ${words(values[i])}` : ""}`} onClick={onPick ? () => onPick(i) : null} />
      ))}
    </div>
  );
}

function Token({ text, value, limit, pressed, disabled, title, onClick }) {
  const share = limit && value ? Math.round(50 * Math.min(1, Math.abs(value) / limit)) : 0;
  const style = share ? { background: `color-mix(in srgb, var(${value < 0 ? "--against" : "--for"}) ${share}%, var(--page))` } : undefined;
  if (!onClick) return <span class="token" style={style} title={title}>{text}</span>;
  return <button type="button" class="token" style={style} aria-pressed={pressed} disabled={disabled} title={title} onClick={onClick}>{text}</button>;
}
