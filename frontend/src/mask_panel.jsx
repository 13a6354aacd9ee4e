// What is drawn: the catalogue with its parameters, the algebra, the layers, the brush.

import { useSignal, useSignalEffect } from "@preact/signals";
import { grouped, percent } from "./format.js";

export function MaskPanel({ studio }) {
  const masks = studio.catalogue.value?.masks ?? [];
  const name = useSignal("causal");
  const settings = useSignal({});
  const entry = masks.find((mask) => mask.name === name.value);
  const spec = studio.view.value?.layers[studio.layer.value]?.spec;

  // The form shows the layer's own mask while that is one of the catalogue.
  useSignalEffect(() => {
    const shown = studio.view.value?.layers[studio.layer.value]?.spec;
    if (!studio.catalogue.value) return;
    if (shown) {
      name.value = shown.name;
      settings.value = textsOf(shown.parameters ?? {});
    } else if (!settings.peek().n && studio.size.value) settings.value = { ...settings.peek(), n: String(studio.size.value) };
  });

  const choose = (event) => {
    const mask = masks.find((each) => each.name === event.currentTarget.value);
    const begin = { ...mask.example };
    const typed = spec && settings.value.n; // it may wait to be used yet
    if (mask.parameters.some((parameter) => parameter.name === "n")) begin.n = typed || String(studio.size.value);
    name.value = mask.name;
    settings.value = begin;
    studio.act("pick", { layer: studio.layer.value, name: mask.name, settings: begin });
  };

  // What is typed is used when the hand rests, not with each of its digits.
  const set = (parameter, value, delay = 0) => {
    if (settings.value[parameter] === value) return delay || studio.hurry();
    settings.value = { ...settings.value, [parameter]: value };
    if (spec?.name !== name.value) return;
    studio.soon(() => studio.act("pick", { layer: studio.layer.value, name: name.value, settings: settings.value }), delay);
  };

  const send = (op, values = {}) => studio.act(op, { layer: studio.layer.value, name: name.value, settings: settings.value, ...values });

  return (
    <section class="panel" aria-labelledby="mask-title">
      <h2 id="mask-title">Mask</h2>
      <label class="field">
        <span>Catalogue</span>
        <select value={name.value} onChange={choose}>
          {masks.map((mask) => <option value={mask.name}>{mask.name.replaceAll("_", " ")}</option>)}
        </select>
      </label>
      <div class="parameters">
        {entry?.parameters.map((parameter) => (
          <Parameter key={`${entry.name}.${parameter.name}`} parameter={parameter} value={settings.value[parameter.name]} set={set} />
        ))}
      </div>
      <p class="relation" title={entry?.relation}>{entry?.relation ?? "\u00a0"}</p>
      <div class="buttons" role="group" aria-label="Combine">
        <button type="button" onClick={() => send("pick")}>Use</button>
        <button type="button" onClick={() => send("combine", { sign: "and" })} title="Pairs that both allow">& and</button>
        <button type="button" onClick={() => send("combine", { sign: "or" })} title="Pairs that either allows">| or</button>
        <button type="button" onClick={() => studio.act("invert", { layer: studio.layer.value })} title="Pairs that the mask forbids">~ not</button>
      </div>
    </section>
  );
}

export function Parameter({ parameter, value, set }) {
  const { name, kind, choices, default: otherwise, required } = parameter;
  const shown = value ?? (otherwise === null || otherwise === undefined ? "" : String(otherwise));
  if (kind === "bool")
    return (
      <label class="check">
        <input type="checkbox" checked={shown === "true"} onChange={(event) => set(name, String(event.currentTarget.checked))} />
        <span>{name}</span>
      </label>
    );
  if (choices.length)
    return (
      <label class="field">
        <span>{name}</span>
        <select value={shown} onChange={(event) => set(name, event.currentTarget.value)}>{choices.map((choice) => <option>{choice}</option>)}</select>
      </label>
    );
  const number = kind === "int";
  return (
    <label class={number ? "field number" : "field"}>
      <span>{name}</span>
      <input type={number ? "number" : "text"} min={number ? 0 : undefined} value={shown} required={required} spellcheck={false} autocomplete="off"
        onInput={(event) => number && event.currentTarget.value !== "" && set(name, event.currentTarget.value, 250)}
        onChange={(event) => set(name, event.currentTarget.value)} />
    </label>
  );
}

export function LayersPanel({ studio }) {
  const layers = studio.view.value?.layers ?? [];
  const stacked = studio.view.value?.stacked;
  return (
    <section class="panel" aria-labelledby="layers-title">
      <h2 id="layers-title">Layers <span class="aside">{stacked ? `a stack of ${layers.length}` : "one mask for all"}</span></h2>
      <ol class="layers">
        {layers.map((layer, i) => (
          <li key={i}>
            <button type="button" class="layer" aria-pressed={i === studio.layer.value} onClick={() => studio.selectLayer(i)}>
              <span class="n">{stacked ? i + 1 : "∀"}</span>
              <span class="title" title={layer.title}>{layer.title}</span>
              <span class="n share">{percent(layer.density)}</span>
            </button>
            {stacked && studio.place !== "report" && (
              <button type="button" class="icon" aria-label={`Remove layer ${i + 1}`} onClick={() => studio.act("unstack", { layer: i })}>×</button>
            )}
          </li>
        ))}
      </ol>
      {studio.place !== "report" && (
        <div class="buttons">
          <button type="button" onClick={() => studio.act("stack", { layer: studio.layer.value })}>Add a layer</button>
        </div>
      )}
    </section>
  );
}

const TOOLS = [
  ["look", "Look", "v"],
  ["allow", "Allow", "a"],
  ["forbid", "Forbid", "f"],
];

export function BrushPanel({ studio }) {
  return (
    <section class="panel" aria-labelledby="brush-title">
      <h2 id="brush-title">Paint</h2>
      <div class="segments" role="radiogroup" aria-label="What the pointer does">
        {TOOLS.map(([tool, label, key]) => (
          <label key={tool} title={`${label} (${key})`}>
            <input type="radio" name="tool" value={tool} checked={studio.tool.value === tool} onChange={() => (studio.tool.value = tool)} />
            <span>{label}</span>
          </label>
        ))}
      </div>
      <label class="field number">
        <span>block</span>
        <input type="number" min="1" max={studio.size.value || 1} value={studio.brush.value}
          onInput={(event) => (studio.brush.value = Math.max(1, Math.floor(Number(event.currentTarget.value)) || 1))} />
      </label>
    </section>
  );
}

/** A file that the reader picks is read here and sent as text: the server opens nothing. */
export function FileButton({ label, onText, studio }) {
  const read = async (event) => {
    const input = event.currentTarget;
    const [file] = input.files;
    if (!file) return;
    if (file.size > 1_500_000) studio.message.value = { kind: "error", text: `${file.name} is too large for the page: use attnflow studio ${file.name}` };
    else onText(await file.text());
    input.value = "";
  };
  return (
    <label class="file">
      <input type="file" accept=".json,application/json" onChange={read} />
      <span>{label}</span>
    </label>
  );
}

const textsOf = (parameters) => Object.fromEntries(Object.entries(parameters).map(([name, value]) => [name, Array.isArray(value) ? value.join(",") : String(value)]));
