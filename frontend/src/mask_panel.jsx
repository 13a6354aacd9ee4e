// What is drawn: the catalogue with its parameters, the algebra, the layers, the brush.

import { useSignal, useSignalEffect } from "@preact/signals";
import { grouped, percent, plural } from "./format.js";

export function MaskPanel({ studio }) {
  const masks = studio.catalogue.value?.masks ?? [];
  const name = useSignal("causal");
  const settings = useSignal({});
  const entry = masks.find((mask) => mask.name === name.value);
  const spec = studio.view.value?.layers[studio.layer.value]?.spec;
  const candidate = studio.candidate.value;
  const { value: preview, error } = studio.preview.value;

  // The form shows what was chosen; else the layer's own mask, while that is one of the catalogue.
  useSignalEffect(() => {
    const own = studio.view.value?.layers[studio.layer.value]?.spec;
    const chosen = studio.candidate.value;
    const begun = studio.preview.value.value;
    if (!studio.catalogue.value) return;
    if (chosen) {
      name.value = chosen.name;
      if (chosen.settings || begun?.name === chosen.name) settings.value = chosen.settings ?? begun.settings;
    } else if (own) {
      name.value = own.name;
      settings.value = textsOf(own.parameters ?? {});
    } else if (!settings.peek().n && studio.size.value) settings.value = { ...settings.peek(), n: String(studio.size.value) };
  });

  const choose = (event) => {
    studio.hurry();
    studio.consider({ name: event.currentTarget.value });
  };

  // What is typed counts when the hand rests, not with each of its digits: it changes the mask that the form shows, or
  // else what is considered.
  const set = (parameter, value, delay = 0) => {
    if (settings.value[parameter] === value) return delay || studio.hurry();
    settings.value = { ...settings.value, [parameter]: value };
    const typed = { name: name.value, settings: settings.value };
    if ((candidate && !candidate.own) || spec?.name !== typed.name) return studio.soon(() => studio.consider(typed), delay);
    studio.soon(async () => (await studio.act("pick", { layer: studio.layer.value, ...typed })) || studio.consider({ ...typed, own: true }), delay);
  };

  const send = (op, values = {}) => studio.act(op, { layer: studio.layer.value, name: name.value, settings: settings.value, ...values });
  const isOwn = !candidate && Boolean(spec);
  const isRead = !candidate || candidate.settings || preview?.name === candidate.name; // the form has its settings
  const isUsable = !isOwn && !error && isRead;
  const fits = !preview || preview.size === studio.size.value;

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
      <p class={error ? "choice trouble" : "choice"} role="status">{error || choiceText(studio, isOwn, preview)}</p>
      <div class="buttons" role="group" aria-label="Combine">
        <button type="button" class={candidate ? "ready" : ""} disabled={!isUsable} onClick={() => send("pick")} title="Replace the mask">Use</button>
        <button type="button" disabled={!isUsable || !fits} onClick={() => send("combine", { sign: "and" })} title="Pairs that both allow">& and</button>
        <button type="button" disabled={!isUsable || !fits} onClick={() => send("combine", { sign: "or" })} title="Pairs that either allows">| or</button>
        <button type="button" onClick={() => studio.act("invert", { layer: studio.layer.value })} title="Pairs that the mask forbids">~ not</button>
      </div>
    </section>
  );
}

function choiceText(studio, isOwn, preview) {
  if (isOwn) return "This is the mask. Choose another one to replace it or to join both.";
  if (!preview) return studio.candidate.value ? "…" : "Use replaces the mask by this one; & and | join both.";
  if (preview.size === studio.size.value) return "A preview. Use takes it, & and | join it to the mask, Esc leaves it.";
  return `A preview with ${plural(preview.size, "position")}. The mask has ${grouped(studio.size.value)}, so only Use can take it.`;
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
    <label class={number ? `field number${name.length > 7 ? " long" : ""}` : "field"}>
      <span title={name}>{name}</span>
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
            {stacked && (
              <button type="button" class="icon" aria-label={`Remove layer ${i + 1}`} onClick={() => studio.act("unstack", { layer: i })}>×</button>
            )}
          </li>
        ))}
      </ol>
      <div class="buttons">
        <button type="button" onClick={() => studio.act("stack", { layer: studio.layer.value })}>Add a layer</button>
      </div>
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
