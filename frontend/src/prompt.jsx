// The first screen of a model: a prompt, its answer, the flow that made it, and the four questions about a line of it.

import { useSignal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import { Cards } from "./cards.jsx";
import { Flow, shownEdges, spoken, textOf } from "./flow.jsx";
import { percent, plural } from "./format.js";
import { Views } from "./model.jsx";
import { createModel } from "./model.js";
import { Bar, fixed, signed } from "./model_charts.jsx";
import { isLit, sameLine } from "./prompt.js";
import { Save, saveText } from "./save.jsx";

export function Prompt({ studio }) {
  studio.model ??= createModel(studio);
  const state = studio.model;
  useEffect(() => {
    studio.opened.value = true;
    state.open();
  }, []);
  if (state.info.value && !state.info.value.model) return <NoModel isGuest={studio.guest.value} />;
  const panes = state.panes.value;
  return (
    <main class={panes.length > 1 ? "prompt two" : "prompt"}>
      <div class="panes">{panes.map((pane) => <Pane key={pane.number} state={state} studio={studio} pane={pane} />)}</div>
      <Cards state={state} pane={state.pane.value} />
      {state.pane.value.flow.value.value && <Lists pane={state.pane.value} flow={state.pane.value.flow.value.value} onPick={(item) => state.pane.value.choose(item)} />}
      <Views state={state} studio={studio} />
    </main>
  );
}

function NoModel({ isGuest }) {
  return (
    <main class="model-none">
      <div class="ended">
        <h2>No model</h2>
        {isGuest ? (
          <p>This link is from an earlier run and opens its design alone. For a model, open the address that <code>attnflow studio</code> printed.</p>
        ) : (
          <p>Start the studio with one, type a prompt, and see who told the model its answer: <code>attnflow studio smollm2-135m</code>, a folder, a GGUF file or a model of the hub.</p>
        )}
      </div>
    </main>
  );
}

function Pane({ state, studio, pane }) {
  const { value: flow, error } = pane.flow.value;
  const several = state.panes.value.length > 1;
  const most = Math.max(1e-9, ...state.panes.value.flatMap((one) => one.flow.value.value?.edges.slice(0, 1).map((edge) => Math.abs(edge.carried)) ?? []));
  const limit = useSignal(30);
  const pick = (item) => {
    state.activate(pane.number);
    pane.choose(item);
  };
  return (
    <section class={several && state.pane.value === pane ? "pane active" : "pane"} aria-label={several ? `Picture ${pane.number + 1}` : "Picture"}>
      <Typed state={state} studio={studio} pane={pane} />
      {pane.likely.value.error && <p class="trouble" role="alert">{pane.likely.value.error}</p>}
      {error && <p class="trouble" role="alert">{error}</p>}
      <Answer state={state} pane={pane} />
      {flow ? (
        <figure class={pane.isStale.value ? "flow-figure old" : "flow-figure"} data-saved data-value={flow.value}>
          <Flow pane={pane} limit={limit.value} most={most} onPick={pick} />
          <figcaption>
            <p class="readout n" aria-live="polite">{spoken(flow, pointed(pane, flow))}</p>
            <p class="legend"><span class="swatch for" /> for the answer <span class="swatch against" /> against it <span class="mark">◆</span> an entry <span class="aside n">width: what it carries; {percent(flow.covered[limit.value])} of what moves lies in the strongest {limit.value} lines</span></p>
            <div class="figure-tools"><Save name={`flow ${flow.answer}`} rows={() => flowRows(flow)} /><label class="field lines-field"><span>lines</span><select aria-label="Lines that are drawn" value={limit.value} onChange={(event) => (limit.value = Number(event.currentTarget.value))}>{[5, 20, 30, 80, 200].map((count) => <option value={count}>the strongest {count}</option>)}</select></label></div>
          </figcaption>
        </figure>
      ) : (
        !error && !pane.likely.value.error && <p class="quiet waits">{state.error.value ? "The model has not been read." : state.info.value ? "The answer is being explained …" : "The model is being read …"}</p>
      )}
    </section>
  );
}

/** What the line below the picture is about: what is pointed at; of a head or token, its strongest line here; or the chosen one. */
function pointed(pane, flow) {
  const lit = pane.lit.value;
  if (!lit) return pane.chosen.value;
  const items = lit.entry === undefined ? flow.edges : flow.entries;
  return items.find((item) => sameLine(item, lit)) ?? items.find((item) => isLit(item, lit)) ?? (lit.isEcho || lit.query === undefined ? null : lit);
}

/** Every line and entry that the server has listed. */
const flowRows = (flow) => [
  ["what", "half", "layer", "head", "from", "from position", "at", "at position", "weight or activation", "carried", "effect", "promotes"],
  ...flow.edges.map((edge) => [edge.name, edge.half, edge.layer, edge.head, textOf(flow, edge, "key"), edge.key, textOf(flow, edge, "query"), edge.query, edge.weight, edge.carried, edge.effect, ""]),
  ...flow.entries.map((entry) => [entry.name, entry.half, entry.layer, "", "", "", entry.token, entry.position, entry.activation, entry.carried, entry.effect, entry.text || entry.promotes]),
];

/** The prompt as typed, what its answer is compared with, and a button only where the answer would not come by itself. */
function Typed({ state, studio, pane }) {
  const info = state.info.value;
  const several = state.panes.value.length > 1;
  const asks = info && (!pane.isQuick.value || pane.flow.value.error) && (pane.isStale.value || !pane.flow.value.value);
  const [done, total, what] = studio.progress.value ?? [0, 0, info ? "" : "starting a process"];
  return (
    <form class="typed" onSubmit={(event) => { event.preventDefault(); pane.explain(); }}>
      <label class="prompt-text">
        <span>{info && !info.reads ? "Token ids" : several ? `Prompt ${pane.number + 1}` : "Prompt"}</span>
        <textarea rows="2" spellcheck={false} disabled={!info} maxLength={info?.max_characters} value={pane.text.value}
          onKeyDown={(event) => { if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); pane.explain(); } }}
          onFocus={(event) => { state.activate(pane.number); event.currentTarget.scrollIntoView({ block: "nearest" }); }}
          onInput={(event) => pane.change({ text: event.currentTarget.value })} />
      </label>
      <div>
        {info?.halves && <TextField label="the answer so far" empty="nothing yet" value={pane.said.value} change={(said) => pane.change({ said })} />}
        <TextField label="compared with" empty="the mean of all tokens" disabled={!info} value={pane.against.value} change={(against) => pane.change({ against })} />
      </div>
      <div class="buttons">
        {asks && <button type="submit" class="ready">Explain</button>}
        {several ? pane.number > 0 && <button type="button" onClick={state.close}>Close</button> : <button type="button" disabled={!pane.flow.value.value} onClick={state.compare}>Compare with a second prompt</button>}
        <button type="button" disabled={!state.busy.value} onClick={state.stop}>Stop</button>
      </div>
      <div class="at-work" role="status">{state.busy.value && pane === state.pane.value && <><progress aria-label="At work" value={total ? done : undefined} max={total || undefined} /><span>{what}</span></>}</div>
    </form>
  );
}

const TextField = ({ label, empty, value, change, disabled = false }) => (
  <label>
    <span>{label}</span>
    <input type="text" autocomplete="off" spellcheck={false} disabled={disabled} placeholder={empty} value={value} onInput={(event) => change(event.currentTarget.value)} />
  </label>
);

/** A token as it is seen, also where it is nothing but space. */
const seen = (token) => token.trim() || (token.includes("\n") ? "↵" : "␣");

/** What the model says, and the tokens that it might have said: one is clicked to be explained in its place. */
function Answer({ state, pane }) {
  const flow = pane.flow.value.value;
  const likely = pane.likely.value.value;
  if (!likely) return <div class="answer" />;
  const position = pane.position.value ?? likely.tokens.length - 1;
  const end = flow?.position ?? (flow?.tokens.length ?? 0) - 1;
  const at = flow?.reach.some((layers, other) => layers >= 0 && other > end) ? "at" : "after"; // as in BERT, which reads what follows, too
  const against = flow?.against.length ? flow.against.map((text) => `“${text.trim()}”`).join(" and ") : "the mean of all tokens";
  const isOld = pane.isStale.value;
  return (
    <div class={isOld ? "answer old" : "answer"}>
      <h2>Why does it say “{seen(flow?.answer ?? likely.likely[0].token)}”? <span class="aside n">{flow ? <>{at} “{flow.tokens[end]}”, logit {signed(flow.value)} above {against}</> : "…"}</span></h2>
      <ul class="likely" aria-label={`What may come after token ${position}`}>
        {likely.likely.map((one) => (
          <li key={one.id}>
            <button type="button" aria-pressed={flow?.answer_id === one.id} title="Explain this answer" onClick={() => { state.activate(pane.number); pane.change({ answer: one.id }); }}>
              <span class="share" style={{ width: `${Math.round(64 * one.chance)}px` }} />{seen(one.token)} <span class="n">{percent(one.chance)}</span>
            </button>
          </li>
        ))}
      </ul>
      {flow && <p class={flow.leaks.length ? "trouble" : "quiet n"}>{flow.leaks.length ? `Leak: ${plural(flow.leaks.length, "line")} through pairs that the order forbids, ${flow.leaks[0].name} from ${flow.leaks[0].key} to ${flow.leaks[0].query} first.` : `What tokens and entries carry sums to the logit, within ${flow.error.toExponential(0)}.`} {isOld ? "The prompt has changed since." : ""}</p>}
    </div>
  );
}

/** The picture as tables, by which it is also read and walked without a pointer. */
function Lists({ pane, flow, onPick }) {
  const edges = shownEdges(flow, 12, null).reverse();
  const limit = Math.max(...[...edges, ...flow.entries.slice(0, 12)].map((item) => Math.abs(item.carried)));
  const Row = ({ item, what }) => (
    <tr class={isLit(item, pane.lit.value) ? "lit" : ""} onPointerEnter={() => (pane.hover.value = item)} onPointerLeave={() => (pane.hover.value = null)}>
      <th scope="row"><button type="button" aria-pressed={sameLine(item, pane.chosen.value)} onClick={() => onPick(item)}>{item.name}</button></th>
      <td>{what}</td>
      <td class="n">{fixed(item.carried)}</td>
      <td><Bar value={item.carried} limit={limit} /></td>
      <td class="n">{fixed(item.effect)}</td>
    </tr>
  );
  const Head = ({ of }) => <thead><tr><th scope="col">{of}</th><th scope="col">{of === "head" ? "from → to" : "at, promotes"}</th><th scope="col" class="n" title="exact share of the logit that passes here">carried</th><td /><th scope="col" class="n" title="first-order estimate of what the logit would lose without it">effect</th></tr></thead>;
  return (
    <details class="lists" open>
      <summary>The strongest lines and entries</summary>
      <div class="tables">
        <div class="scroll" tabIndex={0} role="region" aria-label="Lines" data-saved><Save name="lines" isTable /><table class="numbers lines-table"><Head of="head" /><tbody>{edges.map((edge) => <Row key={`${edge.name}${edge.query}.${edge.key}`} item={edge} what={`${textOf(flow, edge, "key")} (${edge.key}) → ${textOf(flow, edge, "query")} (${edge.query})`} />)}</tbody></table></div>
        <div class="scroll" tabIndex={0} role="region" aria-label="Entries" data-saved><Save name="entries" isTable /><table class="numbers entries-table"><Head of="entry" /><tbody>{flow.entries.slice(0, 12).map((entry) => <Row key={`${entry.name}${entry.position}`} item={entry} what={[`${entry.token} (${entry.position})`, entry.text || entry.promotes].filter(Boolean).join(": ")} />)}</tbody></table></div>
      </div>
    </details>
  );
}
