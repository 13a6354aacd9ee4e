// What is known of the design: its order in numbers, leaks and dead positions, blocks, code.

import { useSignal } from "@preact/signals";
import { grouped, percent, plural } from "./format.js";

const WORDS = {
  Depth: "how many layers it takes until everything that can arrive has arrived",
  Classes: "groups of positions that can all read one another; the boxes of the Hasse diagram",
  Covers: "steps of the order with nothing between them; the lines of the Hasse diagram",
  Pairs: "query and key pairs that the mask of one layer allows",
  Flow: "pairs between which information can flow through any number of layers: the closure of the mask",
};

export function Order({ studio }) {
  const { value, error } = studio.answers.flow.value;
  const layer = studio.view.value?.layers[studio.layer.value];
  const rows = [
    ["Depth", value ? grouped(value.depth) : "–", value ? (value.dense ? "one layer suffices" : value.num_layers ? `of ${plural(value.num_layers, "layer")}` : "layers until all information has flowed") : ""],
    ["Classes", value ? grouped(value.classes) : "–", value ? `on ${plural(value.levels, "level")}` : ""],
    ["Covers", value ? grouped(value.covers) : "–", "edges of the Hasse diagram"],
    ["Pairs", layer ? percent(layer.density) : "–", layer ? `${grouped(layer.pairs)} in a layer` : ""],
    ["Flow", value ? percent(value.closure_density) : "–", "pairs in the closure"],
  ];
  return (
    <section class="panel order" aria-labelledby="order-title">
      <h2 id="order-title">Order</h2>
      <dl class="facts">
        {rows.map(([name, number, note]) => (
          <div>
            <dt title={WORDS[name]}>{name}</dt>
            <dd><b class="n">{number}</b><small>{note}</small></dd>
          </div>
        ))}
      </dl>
      <details class="words-help">
        <summary>What these words mean</summary>
        <dl>{Object.entries(WORDS).map(([name, text]) => <div key={name}><dt>{name}</dt><dd>{text}</dd></div>)}</dl>
      </details>
      {error && <p class="trouble">{error}</p>}
    </section>
  );
}

const TABS = [
  ["leaks", "Leaks"],
  ["blocks", "Blocks"],
  ["code", "Code"],
];

export function Answers({ studio }) {
  const leaks = studio.answers.leaks.value.value?.total ?? 0;
  const move = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const now = TABS.findIndex(([tab]) => tab === studio.tab.value);
    const [next] = TABS[(now + step + TABS.length) % TABS.length];
    studio.tab.value = next;
    event.currentTarget.querySelector(`#tab-${next}`).focus();
  };
  return (
    <section class="panel answers">
      <div class="tabs" role="tablist" aria-label="What follows" onKeyDown={move}>
        {TABS.map(([tab, label]) => (
          <button type="button" role="tab" id={`tab-${tab}`} key={tab} aria-selected={studio.tab.value === tab} aria-controls="answer" tabIndex={studio.tab.value === tab ? 0 : -1} onClick={() => (studio.tab.value = tab)}>
            {label}
            {tab === "leaks" && leaks > 0 && <span class="count n">{grouped(leaks)}</span>}
          </button>
        ))}
      </div>
      <div id="answer" role="tabpanel" aria-labelledby={`tab-${studio.tab.value}`} tabIndex={0}>
        {{ leaks: <Leaks studio={studio} />, blocks: <Blocks studio={studio} />, code: <Code studio={studio} /> }[studio.tab.value]}
      </div>
    </section>
  );
}

function Leaks({ studio }) {
  const { value, error } = studio.answers.leaks.value;
  if (error) return <p class="trouble">The leaks are not known: {error}.</p>;
  if (!value) return <p class="quiet">…</p>;
  if (!value.labels)
    return <p class="quiet">No labels yet. Set what positions must predict (left, “Labels”). This panel then shows every path by which a label leaks.</p>;
  return (
    <>
      <p class={value.total ? "verdict bad" : "verdict good"}>
        {value.total ? `${plural(value.total, "leak")}: a label can be read where it must be predicted` : `No leak: proved for ${plural(value.labels, "label")}`}
      </p>
      <ol class="leaks">
        {value.leaks.map((leak, i) => (
          <li key={i}>
            <button type="button" aria-pressed={studio.leak.value === i} onClick={() => studio.showLeak(i)}>
              <span class="n">{leak.position}</span>
              <span>reads token {leak.token}<small>{leak.route?.replaceAll("->", "→") ?? "…"}</small></span>
            </button>
          </li>
        ))}
      </ol>
      {value.total > value.leaks.length && <p class="quiet">and {grouped(value.total - value.leaks.length)} more</p>}
      <p class="quiet">{value.num_dead ? <>Dead, no label reads them: <span class="n">{value.dead_text}</span> ({grouped(value.num_dead)})</> : "No position is dead."}</p>
    </>
  );
}

const KINDS = ["full", "partial", "empty"];
function Blocks({ studio }) {
  const { value, error } = studio.answers.blocks.value;
  if (!value) return <p class="quiet">{error || "…"}</p>;
  return (
    <>
      <p class="verdict"><b class="n">{percent(value.skipped)}</b> of {plural(value.total, "block")} of {value.block} are skipped</p>
      <div class="blocks" role="img" aria-label={`${value.full} full, ${value.partial} partial, ${value.empty} empty blocks`}>
        {KINDS.map((kind) => <span class={kind} style={{ flexGrow: value[kind] }} title={`${kind}: ${grouped(value[kind])}`} />)}
      </div>
      <Legend items={KINDS.map((kind) => [kind, `${grouped(value[kind])} ${kind}`])} />
      <p class="quiet">FlexAttention skips empty blocks and applies the mask inside partial ones only. Of the pairs that it computes, {percent(value.used)} are allowed.</p>
    </>
  );
}

function Code({ studio }) {
  const kind = useSignal("attnflow");
  const value = studio.answers.code.value.value;
  if (!value) return <p class="quiet">…</p>;
  const text = value[kind.value];
  return (
    <>
      <div class="row">
        <label class="field">
          <span>for</span>
          <select aria-label="Code for" value={kind.value} onChange={(event) => (kind.value = event.currentTarget.value)}>
            <option value="attnflow">attnflow</option>
            <option value="flex">FlexAttention</option>
          </select>
        </label>
        <CopyButton text={text} />
      </div>
      <pre aria-label="Code"><code>{text}</code></pre>
    </>
  );
}

/** What colours mean: [name of the colour, text]. */
export function Legend({ items, marks = [] }) {
  return <p class="legend">{items.map(([colour, text]) => <><span class={`swatch ${colour}`} /> {text}</>)}{marks.map(([mark, text]) => <><span class={`sign ${mark}`} /> {text}</>)}</p>;
}

export function CopyButton({ text, disabled = false, label = "Copy" }) {
  const copied = useSignal(false);
  const copy = async () => {
    await navigator.clipboard.writeText(typeof text === "function" ? text() : text);
    copied.value = true;
    setTimeout(() => (copied.value = false), 1200);
  };
  return <button type="button" class="copy" disabled={disabled} onClick={copy}>{copied.value ? "Copied" : label}</button>;
}
