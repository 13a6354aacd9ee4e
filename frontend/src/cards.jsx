// The four questions about the line that was chosen: who may send, how strongly, in which geometry, from which store.

import { useEffect, useRef } from "preact/hooks";
import { textOf } from "./flow.jsx";
import { percent, plural } from "./format.js";
import { Bar, fixed, signed } from "./model_charts.jsx";
import { decoded, image, palette } from "./picture.js";
import { sameLine } from "./prompt.js";
import { Save } from "./save.jsx";

export function Cards({ state, pane }) {
  const flow = pane.flow.value.value;
  const chosen = pane.chosen.value;
  if (!flow || !chosen) return <div class="cards" aria-busy />;
  const { value, error, of } = pane.detail.value;
  const isEntry = chosen.entry !== undefined;
  const detail = value && sameLine(of, chosen) ? value : null;
  return (
    <div class="cards" role="group" aria-label="The line that is looked at">
      <Chosen pane={pane} flow={flow} chosen={chosen} state={state} />
      {error && <p class="trouble" role="alert">{error}</p>}
      <Card number="1" title="Who may send?" saves={!isEntry && detail?.tile ? "figure" : null}><May pane={pane} flow={flow} chosen={chosen} detail={isEntry ? null : detail} state={state} /></Card>
      <Card number="2" title="How strongly?" saves={!isEntry && detail?.weights ? "figure" : null}><Strength pane={pane} flow={flow} chosen={chosen} detail={isEntry ? null : detail} /></Card>
      <Card number="3" title="In which geometry?" saves={state.results.geometry.value.value ? "figure" : null}><Geometry state={state} pane={pane} flow={flow} chosen={chosen} /></Card>
      <Card number="4" title="From which store?" saves={detail && (isEntry || detail.why) ? "table" : null}>{isEntry ? <EntryStore state={state} chosen={chosen} detail={detail} pane={pane} flow={flow} /> : <Store pane={pane} flow={flow} chosen={chosen} detail={detail} />}</Card>
    </div>
  );
}

function Card({ number, title, saves, children }) {
  return (
    <section class="card" data-saved aria-labelledby={`card-${number}`}>
      <h3 id={`card-${number}`}><span class="aside n">{number} ·</span> {title}</h3>{saves && <Save name={title} isTable={saves === "table"} />}
      {children}
    </section>
  );
}

const nameOf = (item) => item.name ?? `L${item.layer}H${item.head}`;

function Chosen({ pane, flow, chosen, state }) {
  const isOut = pane.taken.value.some((item) => sameLine(item, chosen));
  const { value: removal, error } = pane.removal.value;
  const isEntry = chosen.entry !== undefined;
  const what = isEntry ? `${nameOf(chosen)} at “${chosen.token}”` : `${nameOf(chosen)}: “${textOf(flow, chosen, "key")}” → “${textOf(flow, chosen, "query")}”`;
  return (
    <section class="card looked" aria-label="What is looked at">
      <h3>{what}</h3>
      <dl class="amounts">
        <div><dt title="exact share of the logit that passes here; no causal claim">carried</dt><dd class="n">{fixed(chosen.carried)}</dd></div>
        <div><dt title="first-order estimate of what the logit would lose without it">effect</dt><dd class="n">{fixed(chosen.effect)}</dd></div>
        <div><dt title="measured: what the logit lost when the model ran without it">removed</dt><dd class="n">{removedOf(removal, chosen)}</dd></div>
      </dl>
      <button type="button" class="take" aria-pressed={isOut} disabled={state.busy.value === "take_out"} onClick={() => pane.takeOut(chosen)}>{isOut ? "Put it back" : "Take it out"}</button>
      {error && <p class="trouble" role="alert">{error}</p>}
      {removal && <p class="quiet n removal" role="status">{removal.items.length > 1 ? `Without ${removal.names.join(", ")}` : `Without ${removal.names[0]}`} the logit is {fixed(removal.value - removal.together)} in place of {fixed(removal.value)}: it loses {fixed(removal.together)}.</p>}
    </section>
  );
}

function removedOf(removal, chosen) {
  const at = removal?.items.findIndex((item) => sameLine(item, chosen)) ?? -1;
  return at < 0 ? "–" : fixed(removal.alone[at]);
}

function May({ pane, flow, chosen, detail, state }) {
  const canvas = useRef(null);
  const tile = detail?.tile;
  useEffect(() => {
    if (!tile || !canvas.current) return;
    const element = canvas.current;
    const colours = palette(element);
    const context = element.getContext("2d");
    const [side, cell] = [element.width, element.width / tile.columns];
    context.clearRect(0, 0, side, side);
    context.fillStyle = colours.panel;
    context.fillRect(0, 0, side, side);
    context.imageSmoothingEnabled = false;
    context.drawImage(image(tile, colours), 0, 0, side, side);
    context.globalAlpha = 0.75;
    context.fillStyle = colours.flow;
    const allowed = decoded(tile).cells.allowed;
    for (let key = 0; key < tile.columns; key++) if (allowed[chosen.query * tile.columns + key]) context.fillRect(key * cell, chosen.query * cell, cell, cell);
    context.globalAlpha = 1;
    context.strokeStyle = colours.ink;
    context.lineWidth = 2;
    context.strokeRect(chosen.key * cell, chosen.query * cell, cell, cell);
  }, [tile, chosen]);
  const count = flow.reach.filter((steps) => steps >= 0).length;
  const end = flow.position === null ? "the answer" : `“${flow.tokens[flow.position]}”`;
  return (
    <div class="beside">
      <div>
        <p>{flow.reach.length ? `${count === flow.tokens.length ? `All ${plural(count, "token")}` : `${count} of ${plural(flow.tokens.length, "token")}`} may reach ${end}.` : flow.encoder_tokens.length ? "No reach is counted across two halves: the audit below tests their order." : "The model declares no order that could be checked."}</p>
        <p class="quiet">{flow.leaks.length ? <b class="trouble">{plural(flow.leaks.length, "line")} against the order.</b> : flow.reach.length ? <><b class="good">Clean:</b> no pair that the order forbids carries anything.</> : ""} {detail?.depth === undefined || detail?.depth === null ? "" : `Depth ${detail.depth}.`}</p>
        <p class="quiet"><button type="button" class="link" onClick={() => state.showMask()}>Draw another mask</button></p>
      </div>
      {tile && <canvas ref={canvas} width="200" height="200" class="small" role="img" aria-label={`Mask of layer ${chosen.layer}: the row of the query and the chosen pair are marked`} />}
    </div>
  );
}

function Strength({ pane, flow, chosen, detail }) {
  if (chosen.entry !== undefined) return <p class="quiet">An entry is written at its own token; nothing is attended to. Its activation here is {signed(chosen.activation)}.</p>;
  if (!detail?.weights) return <p class="quiet">{detail?.note ?? "…"}</p>;
  const row = detail.weights[chosen.head];
  const at = detail.keys.indexOf(chosen.key);
  const names = chosen.half ? flow.encoder_tokens : flow.tokens;
  const [next] = row.map((weight, i) => [weight, i]).filter(([, i]) => i !== at).sort((a, b) => b[0] - a[0]);
  const resting = detail.weights.filter((weights) => weights[0] > 0.5).length;
  const pick = (head, i) => {
    const place = { layer: chosen.layer, head, query: chosen.query, key: detail.keys[i], half: chosen.half ?? "" };
    pane.choose(flow.edges.find((edge) => sameLine(edge, place)) ?? { ...place, name: `L${place.layer}H${head}`, carried: null, effect: null });
  };
  const [wide, high] = [Math.max(3, Math.min(13, 190 / row.length)), Math.max(3, Math.min(12, 110 / detail.weights.length))];
  return (
    <div class="beside">
      <div>
        <p>Head {nameOf(chosen)} gives <b class="n">{percent(row[at])}</b> to “{names[chosen.key]}”{next ? <>, <span class="n">{percent(next[0])}</span> to “{names[detail.keys[next[1]]]}” ({detail.keys[next[1]]})</> : ""}.</p>
        <p class="quiet">Rows: heads of layer {chosen.layer}; columns: tokens; full colour is 100 %. {resting ? `${plural(resting, "head")} rest${resting === 1 ? "s" : ""} on the first token.` : ""} {chosen.bias === null || chosen.bias === undefined ? "" : `The attached bias adds ${signed(chosen.bias)} to this score.`}</p>
      </div>
      <svg class="weights" width={wide * row.length + 2} height={high * detail.weights.length + 2} role="img" aria-label={`Attention weights of “${textOf(flow, chosen, "query")}” in the heads of layer ${chosen.layer}`} onPointerLeave={() => (pane.hover.value = null)}>
        {detail.weights.map((weights, head) => weights.map((weight, i) => (
          <rect x={1 + i * wide} y={1 + head * high} width={wide - 0.8} height={high - 0.8} fill-opacity={0.06 + 0.94 * (weight ?? 0)} class={head === chosen.head && i === at ? "chosen" : pane.lit.value?.layer === chosen.layer && pane.lit.value.head === head && pane.lit.value.key === detail.keys[i] ? "lit" : ""} onPointerEnter={() => (pane.hover.value = { layer: chosen.layer, head, query: chosen.query, key: detail.keys[i], half: chosen.half ?? "", carried: flow.edges.find((edge) => sameLine(edge, { layer: chosen.layer, head, query: chosen.query, key: detail.keys[i], half: chosen.half ?? "" }))?.carried ?? null, weight })} onClick={() => pick(head, i)}>
            <title>{`head ${head}, “${names[detail.keys[i]]}” (${detail.keys[i]}): ${percent(weight)}`}</title>
          </rect>
        )))}
      </svg>
    </div>
  );
}

const DOT = { width: 170, height: 104 };

function Geometry({ state, pane, flow, chosen }) {
  const { value, error } = state.results.geometry.value;
  const heads = value?.stacks.find((stack) => stack.heads.symmetry)?.heads;
  if (error) return <p class="quiet">{error}</p>;
  if (!heads) return <p class="quiet">{value ? "The heads of this model have no scores." : "The weights are being read …"}</p>;
  const [symmetry, directionality] = chosen.entry === undefined && !chosen.half ? [heads.symmetry[chosen.layer]?.[chosen.head], heads.directionality[chosen.layer]?.[chosen.head]] : [];
  const lead = directionality === undefined || directionality === null ? "" : Math.abs(directionality) < 0.1 ? "neither key-led nor query-led" : directionality < 0 ? "key-led" : "query-led";
  const all = heads.symmetry.flatMap((row, layer) => row.map((s, head) => ({ layer, head, s, d: heads.directionality[layer][head] }))).filter(({ s, d }) => s !== null && d !== null);
  const largest = Math.max(0.05, ...all.map(({ s }) => Math.abs(s)));
  const x = (s) => DOT.width / 2 + (s / largest) * (DOT.width / 2 - 6);
  const y = (d) => DOT.height / 2 - d * (DOT.height / 2 - 6);
  const pick = ({ layer, head }) => {
    const line = flow.edges.find((edge) => edge.layer === layer && edge.head === head && !edge.half);
    if (line) pane.choose(line);
  };
  const isHere = ({ layer, head }) => !chosen.half && layer === chosen.layer && head === chosen.head;
  const isLit = ({ layer, head }) => pane.lit.value?.layer === layer && pane.lit.value.head === head;
  return (
    <div class="beside">
      <div>
        {lead ? <p>Head {nameOf(chosen)} is {lead}: directionality <b class="n">{signed(directionality)}</b>, symmetry <b class="n">{signed(symmetry)}</b>.</p> : <p class="quiet">{chosen.half ? "The plane is that of the decoder’s own attention: choose one of its lines." : "An entry has no head: choose a line."}</p>}
        <p class="quiet">Each dot is one of {plural(all.length, "head")}, from the weights alone: ↑ query-led, ↓ key-led, → symmetric.</p>
      </div>
      <svg class="dots" width={DOT.width} height={DOT.height} role="img" aria-label="Symmetry (across) and directionality (up) of every head" onPointerLeave={() => (pane.hover.value = null)}>
        <path class="zero" d={`M0,${DOT.height / 2}H${DOT.width}M${DOT.width / 2},0V${DOT.height}`} />
        {all.map((dot) => <circle cx={x(dot.s)} cy={y(dot.d)} r={isLit(dot) ? 5 : 2.4} class={isLit(dot) ? "lit" : ""} onPointerEnter={() => (pane.hover.value = { layer: dot.layer, head: dot.head })} onClick={() => pick(dot)}><title>{`L${dot.layer}H${dot.head}: symmetry ${signed(dot.s)}, directionality ${signed(dot.d)}`}</title></circle>)}
        {all.filter(isHere).map((dot) => <circle class="chosen" cx={x(dot.s)} cy={y(dot.d)} r="5.5" />)}
      </svg>
    </div>
  );
}

/** Why this key and not that one, by what earlier layers wrote at the two. */
function Store({ pane, flow, chosen, detail }) {
  const why = detail?.why;
  if (!why) return <p class="quiet">{detail?.note ?? "…"}</p>;
  const limit = Math.max(...why.written.map((row) => Math.abs(row.value)));
  const names = chosen.half ? flow.encoder_tokens : flow.tokens;
  const others = detail.keys?.filter((key) => key !== chosen.key) ?? [why.other];
  const fired = flow.entries.filter((entry) => entry.position === chosen.key && (chosen.half ? entry.half === "encoder" : !entry.half)).slice(0, 3);
  return (
    <>
      <p class="contrast">Why “{names[why.key]}” ({why.key}) and not{" "}
        <select aria-label="The other key" value={why.other} onChange={(event) => pane.compareKey(Number(event.currentTarget.value))}>{others.map((key) => <option value={key}>{names[key]} ({key})</option>)}</select>? By what was written at the two:
      </p>
      <table class="numbers written">
        <tbody>
          {why.written.slice(0, 5).map((row) => <tr key={row.name}><th scope="row">{row.name}</th><td class="n">{fixed(row.value)}</td><td><Bar value={row.value} limit={limit} /></td></tr>)}
          <tr><th scope="row">{plural(why.rest.count + Math.max(0, why.written.length - 5), "other")}, and positions</th><td class="n">{fixed(why.total - why.written.slice(0, 5).reduce((sum, row) => sum + row.value, 0))}</td><td /></tr>
        </tbody>
        <tfoot><tr><th scope="row">score of “{names[why.key]}” less “{names[why.other]}”</th><td class="n">{fixed(why.total)}</td><td /></tr></tfoot>
      </table>
      {fired.length > 0 && <p class="quiet fired-at">Entries at “{names[chosen.key]}”: {fired.map((entry) => <button type="button" key={entry.name} title={entry.promotes} onClick={() => pane.choose(entry)}>{entry.name}</button>)}</p>}
    </>
  );
}

function EntryStore({ state, chosen, detail, pane, flow }) {
  const limit = Math.max(1e-9, ...(detail?.sources ?? []).map((source) => Math.abs(source.carried)));
  return (
    <>
      <p>{chosen.name} fires at “{chosen.token}” with <b class="n">{signed(chosen.activation)}</b>{chosen.text ? <>: “{chosen.text}”</> : chosen.promotes ? <> and promotes <b>{chosen.promotes}</b></> : ""}. <button type="button" class="link" onClick={() => state.openEntry({ ...chosen, head: 0 }, chosen.position)}>Its page</button></p>
      {!detail ? <p class="quiet">…</p> : (
        <>
          <p class="quiet">What made it fire, its score of {signed(detail.score)} by source:</p>
          <table class="numbers written"><tbody>{detail.sources.slice(0, 6).map((source, i) => <tr key={i}><th scope="row">{source.name}{source.token ? ` “${source.token}”` : ""}</th><td class="n">{fixed(source.carried)}</td><td><Bar value={source.carried} limit={limit} /></td></tr>)}</tbody></table>
        </>
      )}
    </>
  );
}
