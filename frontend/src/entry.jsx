// What feed-forward layers did for a text, entry by entry, and the page of one entry.

import { useSignal } from "@preact/signals";
import { percent, plural } from "./format.js";
import { ABLATED } from "./model.js";
import { Bar, fixed, HeatMap, signed, Tokens } from "./model_charts.jsx";
import { Save } from "./save.jsx";

export function Trace({ state, value }) {
  const map = useSignal("values");
  const effects = !value.without;
  const isBusy = state.busy.value !== null;
  const what = map.value === "active" ? "Share of active entries" : effects ? "Direct effect of entries on the next token, in logits" : "Norm written by entries";
  return (
    <>
      <Tokens label="Token whose entries are listed" tokens={value.tokens} chosen={value.position} disabled={isBusy} onPick={(position) => state.choose("trace", { position })} />
      <label class="field map-field">
        <span>map</span>
        <select value={map.value} onChange={(event) => (map.value = event.currentTarget.value)}>
          <option value="values">{effects ? "direct effect on the logit of the next token" : "norm of what entries write"}</option>
          <option value="active">share of active entries</option>
        </select>
      </label>
      <HeatMap title={what} values={value[map.value]} x="token" y="layer" sides={value.sides} columns={value.tokens} column={value.position} words={map.value === "active" ? percent : signed} />
      <h3>Entries at “{value.tokens[value.position]}” <span class="aside">{value.answer ? `effects on the next token “${value.answer}”` : ""}{value.logit === null ? "" : `: logit ${Math.abs(value.logit)} ${value.logit < 0 ? "below" : "above"} the mean, probability ${chance(value.chance)}`}</span></h3>
      {value.without && <p class="quiet">No direct effects: {value.without}.</p>}
      {value.entries.length ? <Fired state={state} value={value} isBusy={isBusy} /> : <p class="quiet">No entry fired for this token.</p>}
    </>
  );
}

/** The entries of a token: what each adds itself, and what is lost when the model runs again without it. */
function Fired({ state, value, isBusy }) {
  const { text } = state.results.trace.value;
  const isOut = value.entries.some((entry) => entry.ablated !== null);
  const limit = Math.max(...value.entries.flatMap((entry) => [entry.effect, entry.ablated]).map((effect) => Math.abs(effect ?? 0)));
  const Effect = ({ of }) => <><td class="n">{fixed(of, 3)}</td><td>{of !== null && <Bar value={of} limit={limit} />}</td></>;
  return (
    <>
      <label class="switch"><input type="checkbox" role="switch" checked={state.isAblated.value} disabled={isBusy} onChange={(event) => state.ablate(event.currentTarget.checked)} /> Take the {ABLATED} strongest out, one by one</label>
      <p class="quiet">
        {state.busy.value === "trace" ? "At work …" : value.note || "An effect is a first-order estimate of what the logit loses without the entry, over all paths; the model may lose much less, or gain."}
      </p>
      <div class="scroll" tabIndex={0} role="region" aria-label="Entries that fired" data-saved><Save name="entries that fired" isTable />
        <table class="numbers fired">
          <thead>
            <tr>
              <th scope="col">entry</th><th scope="col" class="n">layer</th><th scope="col" class="n">number</th>
              <th scope="col" class="n">effect</th><td />
              {isOut && <><th scope="col" class="n">ablated</th><td /><th scope="col" class="n" title="percentage points of its probability">points lost</th></>}
              <th scope="col">promotes here</th><th scope="col">suppresses here</th><th scope="col" class="n">score</th><th scope="col" class="n">weight</th><th scope="col" class="n">norm</th>
            </tr>
          </thead>
          <tbody>
            {value.entries.map((entry) => (
              <tr key={entry.name}>
                <th scope="row" class="n"><button type="button" disabled={isBusy} title="The page of this entry" onClick={() => state.openEntry(entry, value.position, text)}>{entry.name}</button></th>
                <td class="n">{entry.layer}</td><td class="n">{entry.neuron}</td>
                <Effect of={entry.effect} />
                {isOut && <><Effect of={entry.ablated} /><td class="n">{entry.lost === null ? "–" : points(entry.lost)}</td></>}
                {entry.text ? <td colSpan={2}>{entry.text}</td> : <><td class="words">{entry.promotes}</td><td class="words">{entry.suppresses}</td></>}
                <td class="n">{fixed(entry.score)}</td>
                <td class="n">{fixed(entry.weight)}</td>
                <td class="n">{entry.norm === null ? "–" : entry.norm.toFixed(2)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </>
  );
}

export function Entry({ state, value }) {
  const isBusy = state.busy.value !== null;
  const { text } = state.results.entry.value;
  const open = (entry, position = value.position) => state.openEntry(entry, position, text);
  return (
    <>
      <h3>Entry {value.name} <span class="aside n">{value.place} · id {value.entry}{value.head ? `, head ${value.head}` : ""} · norm of its value {value.norm}</span></h3>
      <Tokens label="Token after which the next one is predicted" tokens={value.tokens} values={value.weights} chosen={value.position} disabled={isBusy} onPick={(position) => open(value, position)} words={(weight) => (weight ? `weight ${signed(weight)}` : "others are stronger")} />
      <p class="quiet">Coloured where the entry is among the strongest of its layer: blue with a positive weight, orange with a negative one, which exchanges up and down.</p>
      <Without state={state} value={value} isBusy={isBusy} />
      {value.without && <p class="quiet">Its tokens are unknown: {value.without}.</p>}
      <div class="charts">
        {!value.without && <Words title="Pushes up" rows={value.up} />}
        {!value.without && <Words title="Pushes down" rows={value.down} />}
        <Nearest title="Nearest by value: say the same" rows={value.near.value} isBusy={isBusy} head={value.head} open={open} />
        <Nearest title="Nearest by key: fire for the same" rows={value.near.key} isBusy={isBusy} head={value.head} open={open} />
      </div>
      {!value.without && <p class="quiet">σ is the standard deviation, over the vocabulary, of what the entry adds to logits at weight 1.</p>}
      <Passages state={state} value={value} isBusy={isBusy} />
    </>
  );
}

function Passages({ state, value, isBusy }) {
  const { value: last, error } = state.results.passages.value;
  const found = last?.entry === value.entry && last.layer === value.layer ? last : null;
  return (
    <section class="passages" aria-label="Where it fires most">
      <h3>Where it fires most <span class="aside n">{found ? `active at ${percent(found.active / found.read)} of ${plural(found.read, "token")}` : ""}</span></h3>
      {error && <p class="trouble" role="alert">{error}</p>}
      {!found && <p class="quiet"><button type="button" disabled={isBusy} onClick={state.findPassages}>Look for it</button> in the text{state.info.value.reads ? " and in twelve sonnets of Shakespeare" : ""}</p>}
      {found?.examples.map((one) => (
        <div class="passage" key={one.text}>
          <span class="n">{signed(one.weight)}</span>
          <Tokens label={one.text ? `Sonnet ${one.text}` : "The text"} tokens={one.tokens} values={one.weights} chosen={one.at} />
        </div>
      ))}
      {found && !found.examples.length && <p class="quiet">It fires for no token of them.</p>}
    </section>
  );
}

/** The switch that takes the entry out, and what the model says next with it and without it. */
function Without({ state, value, isBusy }) {
  const { value: found, error } = state.results.without.value;
  const after = value.tokens[value.position];
  const shown = state.isOut.value && found?.entry === value.entry && found.position === value.position ? found : null;
  const limit = shown ? Math.max(...shown.rows.map((row) => Math.abs(row.change))) : 0;
  return (
    <section class="without" aria-label="The next token without this entry" data-saved>{shown && <Save name="without the entry" isTable />}
      <label class="switch"><input type="checkbox" role="switch" checked={state.isOut.value} disabled={isBusy} onChange={(event) => state.takeOut(event.currentTarget.checked)} /> Take the entry out, and see the next token after “{after}”</label>
      {state.isOut.value && error && <p class="trouble" role="alert">{error}</p>}
      {shown && (
        <>
          <table class="numbers">
            <thead><tr><th scope="col">next token</th><th scope="col" class="n">with</th><th scope="col" class="n">without</th><th scope="col" class="n">points</th><td /></tr></thead>
            <tbody>{shown.rows.map((row, i) => <tr key={i}><th scope="row">{row.token}</th><td class="n">{chance(row.before)}</td><td class="n">{chance(row.after)}</td><td class="n">{points(row.change)}</td><td><Bar value={row.change} limit={limit} /></td></tr>)}</tbody>
          </table>
          <p class="quiet">The most likely token {shown.changed ? "changes" : "stays"}; the chances differ by {shown.kl} nats (Kullback-Leibler). Later layers have run again, so this is not the direct effect.</p>
        </>
      )}
    </section>
  );
}

const chance = (share) => (share < 0.001 ? `${(100 * share).toPrecision(2)} %` : percent(share));
/** A change of a chance, in percentage points. */
const points = (change) => (Math.abs(change) < 5e-7 ? "0" : signed(100 * change));

function Words({ title, rows }) {
  const limit = Math.max(...rows.map((row) => Math.abs(row.value)));
  return (
    <figure class="chart" data-saved>
      <figcaption>{title} <Save name={title} isTable /></figcaption>
      <table class="numbers words"><tbody>{rows.map((row, i) => <tr key={i}><th scope="row">{row.token}</th><td class="n">{fixed(row.value)} σ</td><td><Bar value={row.value} limit={limit} /></td></tr>)}</tbody></table>
    </figure>
  );
}

function Nearest({ title, rows, isBusy, head, open }) {
  return (
    <figure class="chart" data-saved>
      <figcaption>{title} <Save name={title} isTable /></figcaption>
      <table class="numbers">
        <thead><tr><th scope="col">entry</th><th scope="col" class="n">cosine</th><th scope="col">pushes up</th></tr></thead>
        <tbody>
          {rows.map((one) => (
            <tr key={one.entry}>
              <th scope="row" class="n"><button type="button" disabled={isBusy} onClick={() => open({ ...one, head })}>{one.name}</button></th>
              <td class="n">{fixed(one.cosine)}</td>
              <td>{one.words}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </figure>
  );
}
