// The model that the studio was started with: its audit, its geometry, its bias, what its feed-forward layers do.

import { useSignal } from "@preact/signals";
import { Entry, Trace } from "./entry.jsx";
import { Save } from "./save.jsx";
import { grouped, percent, plural } from "./format.js";
import { AuditMap, HeatMap, Plane, signed } from "./model_charts.jsx";
import { VIEWS } from "./model.js";
import { Why } from "./why.jsx";

const TITLES = { audit: "Audit", geometry: "Geometry", bias: "Bias", trace: "Trace", entry: "Entry", why: "Why" };
const ABOUT = {
  audit: "Changes tokens and watches every module. An output that changes although the model’s order forbids it is a leak, shown with the layer and module where it starts.",
  geometry: "Symmetry and directionality of W_q and W_k in every layer and head, from the weights alone.",
  bias: "What the attached bias adds to the attention scores for this text, layer by layer, centred over each row.",
  trace: "Which entries of the feed-forward layers fire for each token, and what they add to the logit of the next one.",
  entry: "One entry of the feed-forward layers: the tokens it pushes up and down, the texts where it fires most, the entries most like it, and the next token without it.",
  why: "Why a query attends to a key: the score of one head as an exact sum over pairs of what earlier layers wrote at the two tokens.",
};

// What is typed for a view: a signal of the state, its label, what an empty field means.
const FIELDS = { entry: [["entry", "entry", "the strongest"], ["of", "layer", "its own"]], why: [["layer", "layer", "the middle one"], ["head", "head", "the telling one"]] };

/** The views of a model: they share the text, the head and the token of the prompt above. */
export function Views({ state, studio }) {
  return (
    <section class="model" aria-label="More about the model">
      <Tabs state={state} />
      <div class="side" role="group" aria-label="Model">
        <Work state={state} studio={studio} />
        <About state={state} />
      </div>
      <div id="model-view" class="view" role="tabpanel" aria-labelledby={`model-${state.tab.value}`}>
        <View state={state} />
      </div>
    </section>
  );
}

function About({ state }) {
  const info = state.info.value;
  const rows = info
    ? [["kind", info.kind], ["parameters", grouped(info.parameters)], ["layers", info.layers], ["heads", info.key_heads && info.key_heads !== info.heads ? `${info.heads} query, ${info.key_heads} key` : info.heads], ["width", info.width]]
    : ["kind", "parameters", "layers", "heads", "width"].map((name) => [name, "–"]);
  return (
    <section class="panel" aria-labelledby="model-title">
      <h2 id="model-title">Model <span class="aside">{info?.model ?? ""}</span></h2>
      <dl class="lines">{rows.map(([name, value]) => <div key={name}><dt>{name}</dt><dd class="n">{value ?? "–"}</dd></div>)}</dl>
      {state.error.value && <p class="trouble" role="alert">{state.error.value} <button type="button" onClick={state.open}>Read it again</button></p>}
    </section>
  );
}

/** What is at work and how far it is; of fixed height, so that nothing jumps when it begins or ends. */
function Work({ state, studio }) {
  const busy = state.busy.value;
  const [done, total, what] = studio.progress.value ?? [0, 0, "starting a process"];
  const name = state.tab.value;
  const result = state.results[name].value;
  const ready = state.info.value && !busy && (name !== "bias" || state.info.value.bias);
  const asks = !state.isQuick(name) || (FIELDS[name] ?? []).length > 0; // the others answer by themselves
  return (
    <section class="panel work" aria-labelledby="work-title">
      <h2 id="work-title">{TITLES[name]}</h2>
      <p class="quiet about">{ABOUT[name]}</p>
      <form onSubmit={(event) => { event.preventDefault(); if (ready) state.run(name); }}>
        {(FIELDS[name] ?? []).map(([field, label, empty]) => (
          <label class="field" key={field}>
            <span>{label}</span>
            <input type="text" inputMode="numeric" autocomplete="off" placeholder={empty} value={state.fields[field].value} onInput={(event) => (state.fields[field].value = event.currentTarget.value)} />
          </label>
        ))}
        <div class="buttons">
          {asks && <button type="submit" disabled={!ready}>{result.value ? "Run again" : "Run"}</button>}
          <button type="button" disabled={!busy} onClick={state.stop}>Stop</button>
        </div>
      </form>
      <div class="progress" role="status">
        {busy && (
          <>
            <progress aria-label={`Progress of ${busy}`} value={total ? done : undefined} max={total || undefined} />
            <p><span>{what}</span> <span class="n">{total ? `${grouped(done)} of ${grouped(total)}` : ""}</span></p>
          </>
        )}
      </div>
    </section>
  );
}

function Tabs({ state }) {
  const move = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const next = VIEWS[(VIEWS.indexOf(state.tab.value) + step + VIEWS.length) % VIEWS.length];
    state.openTab(next);
    event.currentTarget.querySelector(`#model-${next}`).focus();
  };
  return (
    <div class="tabs" role="tablist" aria-label="What is asked of the model" onKeyDown={move}>
      {VIEWS.map((name) => (
        <button type="button" role="tab" id={`model-${name}`} key={name} aria-selected={state.tab.value === name} aria-controls="model-view" tabIndex={state.tab.value === name ? 0 : -1} onClick={() => state.openTab(name)}>
          {TITLES[name]}
          {name === "audit" && state.results.audit.value.value?.total > 0 && <span class="count n">{state.results.audit.value.value.total}</span>}
        </button>
      ))}
    </div>
  );
}

function View({ state }) {
  const name = state.tab.value;
  const { value, error, text } = state.results[name].value;
  const info = state.info.value;
  const Shown = { audit: Audit, geometry: Geometry, bias: Bias, trace: Trace, entry: Entry, why: Why }[name];
  return (
    <>
      {error && <p class="trouble" role="alert">{error}</p>}
      {value && name !== "geometry" && text !== state.text.value && <p class="quiet stale">The text has changed since: run it again.</p>}
      {value ? <Shown state={state} value={value} /> : !error && <p class="quiet">{emptyText(state, name, info)}</p>}
    </>
  );
}

function emptyText(state, name, info) {
  if (state.busy.value === name) return "At work …";
  if (!info) return state.error.value ? "The model has not been read." : "The model is being read …";
  if (name === "bias" && !info.bias) return "This model has no attached bias. Start the studio with one: attnflow studio MODEL --bias DIR.";
  return `Nothing yet: “Run” asks it.`;
}

function Audit({ value }) {
  const [first] = value.violations;
  const module = useSignal(null); // whose violations are listed
  const listed = value.violations.filter((each) => module.value === null || each.module === module.value);
  return (
    <>
      <p class={`verdict ${value.verdict === "leak" ? "bad" : value.verdict === "clean" ? "good" : ""}`} role="status">
        {first ? <>{plural(value.total, "violation")}; the first thing that moves is <code>{first.module}</code>{first.layer === null ? "" : `, layer ${first.layer}`}</> : value.verdict === "clean" ? "Clean: no output moved against the order" : "Nothing was tested: the order forbids no pair"}
      </p>
      <AuditMap value={value} first={first} module={module} />
      {first && (
        <div data-saved><Save name="violations" isTable /><table class="violations">
          <thead><tr><th scope="col">kind</th><th scope="col">module</th><th scope="col" class="n">layer</th><th scope="col">from</th><th scope="col">to</th><th scope="col" class="n">change</th></tr></thead>
          <tbody>
            {listed.map((each, i) => (
              <tr key={i} title={each.text}>
                <th scope="row">{each.kind}</th>
                <td><code>{each.module}</code></td>
                <td class="n">{each.layer ?? "–"}</td>
                <td>{place(value, each.source)}</td>
                <td>{place(value, each.target)}</td>
                <td class="n">{each.change}</td>
              </tr>
            ))}
          </tbody>
        </table></div>
      )}
      {value.total > value.violations.length && <p class="quiet">and {grouped(value.total - value.violations.length)} more</p>}
      <dl class="lines">{value.facts.map(([name, text]) => <div key={name}><dt>{name}</dt><dd class="n">{text}</dd></div>)}</dl>
      {value.notes.map((note) => <p class="quiet">{note}</p>)}
    </>
  );
}

const place = (value, position) => (position === null ? "–" : value.tokens[position] === undefined ? `${position}` : `${position} ${value.tokens[position]}`);

function Geometry({ state, value }) {
  return value.stacks.map((stack) => (
    <section key={stack.what}>
      <h3>{value.stacks.length > 1 ? stack.what : plural(stack.points.length, "layer")} <span class="aside n">median symmetry {signed(stack.quartiles.symmetry[1])}, directionality {signed(stack.quartiles.directionality[1])} ({value.reading})</span></h3>
      <div class="charts">
        <Plane stack={stack} />
        {stack.heads.symmetry && (
          <div class="heads">
            <Heads title="Symmetry of heads" state={state} values={stack.heads.symmetry} />
            <Heads title="Directionality of heads" state={state} values={stack.heads.directionality} />
          </div>
        )}
      </div>
      <p class="quiet">Grey: 19 of 20 random matrices of width {stack.width} lie here. Ignored: {value.ignored}.</p>
      {value.notes.map((note) => <p class="quiet">{note}</p>)}
    </section>
  ));
}

const Heads = ({ title, state, values }) => <HeatMap title={title} onPick={state.pickHead} row={Number(state.fields.layer.value)} column={/^\d+$/.test(state.fields.head.value) && Number(state.fields.layer.value) < values.length ? Number(state.fields.head.value) : null} values={values} x="head" y="layer" sides={values.map((_, i) => `layer ${i}`)} columns={values[0].map((_, i) => `head ${i}`)} />;

function Bias({ state, value }) {
  return (
    <>
      <h3>Strength by layer</h3>
      <div data-saved><Save name="bias by layer" isTable /><table class="numbers">
        <thead><tr><th scope="col">layer</th><th scope="col" class="n">strength</th><th scope="col" class="n">weight moved</th><th scope="col" class="n">rank 1</th></tr></thead>
        <tbody>
          {value.layers.map((each) => (
            <tr key={each.layer}>
              <th scope="row"><button type="button" aria-pressed={value.layer === each.layer} disabled={state.busy.value !== null} onClick={() => state.choose("bias", { layer: value.layer === each.layer ? null : each.layer })}>{each.layer}</button></th>
              <td class="n">{each.strength ?? "–"}</td>
              <td class="n">{each.moved === null ? "–" : percent(each.moved)}</td>
              <td class="n">{each.rank1 === null ? "–" : percent(each.rank1)}</td>
            </tr>
          ))}
        </tbody>
      </table></div>
      <HeatMap title={value.layer === null ? "The last query in every layer" : `Every query in layer ${value.layer}`} values={value.values} x="key" y={value.layer === null ? "layer" : "query"} sides={value.sides} columns={value.tokens} />
      <p class="quiet">The bias is centred over each row, because softmax sees nothing else of it. Choose a layer to see all its queries.</p>
    </>
  );
}
