// The first screen: what is drawn, the matrix, what follows.

import { useSignalEffect } from "@preact/signals";
import { Answers, CopyButton, Legend, Order } from "./answers.jsx";
import { grouped, percent, plural } from "./format.js";
import { Hasse } from "./hasse.jsx";
import { LabelsPanel } from "./labels_panel.jsx";
import { BrushPanel, FileButton, LayersPanel, MaskPanel } from "./mask_panel.jsx";
import { Matrix } from "./matrix.jsx";
import { Screen, ScreenTabs } from "./screens.jsx";

const NAMES = { families: "the families", family: "the family", flow: "the order", diagram: "the Hasse diagram", leaks: "the leaks", blocks: "the blocks", tile: "the picture", restore: "the design of the link", load: "the file" };

const GUEST = "This link is from an earlier run of the studio; its design is open here.";

export function Page({ studio }) {
  useSignalEffect(() => {
    const layer = studio.view.value?.layers[0];
    if (layer) document.title = `${layer.title.slice(0, 60)} · attnflow studio`;
  });
  if (studio.status.value === "closed" && !studio.view.value) return <Ended reason={studio.reason.value} />;
  return (
    <div class={studio.status.value === "closed" ? "page closed" : "page"} data-settled={studio.asked.value === 0 && studio.view.value !== null} data-linked={studio.linked.value} data-span={studio.window.value?.span ?? studio.size.value}>
      <Bar studio={studio} />
      {studio.screen.value === "mask" ? <MaskScreen studio={studio} /> : <Screen studio={studio} />}
      <Status studio={studio} />
    </div>
  );
}

function MaskScreen({ studio }) {
  return (
    <main>
      <div class="side" aria-label="Design" role="group">
        <MaskPanel studio={studio} />
        <LayersPanel studio={studio} />
        <BrushPanel studio={studio} />
        <LabelsPanel studio={studio} />
      </div>
      <div class="centre">
        <Matrix studio={studio} />
        <Readout studio={studio} />
      </div>
      <div class="side" aria-label="What follows" role="group">
        <Hasse studio={studio} />
        <Order studio={studio} />
        <Answers studio={studio} />
      </div>
    </main>
  );
}

function Bar({ studio }) {
  const view = studio.view.value;
  const onMask = studio.screen.value === "mask";
  return (
    <header>
      <h1><span>attnflow</span> studio</h1>
      <ScreenTabs studio={studio} />
      <span class="subject" title={view?.layers[studio.layer.value]?.title}>{view && onMask ? `${grouped(view.size)} positions` : ""}</span>
      <div class="tools">
        {onMask && <MaskTools studio={studio} view={view} />}
        <button type="button" onClick={toggleTheme} title="Light or dark">Theme</button>
      </div>
    </header>
  );
}

function MaskTools({ studio, view }) {
  return (
    <>
      <button type="button" disabled={!view?.undo} title="Undo (Ctrl Z)" onClick={() => studio.act("undo")}>Undo</button>
      <button type="button" disabled={!view?.redo} title="Redo (Ctrl Shift Z)" onClick={() => studio.act("redo")}>Redo</button>
      <FileButton label="Open…" studio={studio} onText={(text) => studio.act("load", { text })} />
      <CopyButton text={() => location.href} disabled={!view?.design} label="Copy link" />
    </>
  );
}

function toggleTheme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  document.dispatchEvent(new Event("themechange"));
}

function legendOf(studio) {
  const preview = studio.preview.value.value;
  const lit = studio.lit.value;
  if (!preview) return [["given", "allowed"], ["flow", `read after ${plural(lit, "layer")}`], ...(studio.path.value ? [["leak", "path of the leak"]] : [])];
  const name = preview.name.replaceAll("_", " ");
  if (preview.size !== studio.size.value) return [["given", `allowed by ${name}, not used yet: ${plural(preview.pairs, "pair")}`]];
  return [["given", `in both ${grouped(preview.both)}`], ["missing", `only in the mask ${grouped(preview.here)}`], ["extra", `only in ${name} ${grouped(preview.chosen)}`]];
}

function Readout({ studio }) {
  const most = studio.maxLayers.value;
  const field = studio.field.value;
  const lit = Math.min(studio.lit.value, field?.followed ?? Infinity);
  const read = field ? field.runs.reduce((sum, [first, last, layer]) => sum + (layer <= lit ? last - first : 0), 0) : 0;
  const n = studio.size.value;
  return (
    <div class="reading">
      <Legend items={legendOf(studio)} />
      <label class="slider">
        <span>Layers</span>
        <input type="range" aria-label="Layers" min="0" max={most} value={studio.lit.value} aria-valuetext={`after ${studio.lit.value} of ${studio.depth.value} layers`} onInput={(event) => (studio.layers.value = Number(event.currentTarget.value))} />
        <output class="n">{grouped(studio.lit.value)} / {grouped(studio.depth.value)}</output>
      </label>
      <div class="buttons zoom" role="group" aria-label="Zoom">
        <button type="button" aria-label="Zoom in" onClick={() => studio.zoom(0.5, studio.cursor.value ?? undefined)}>+</button>
        <button type="button" aria-label="Zoom out" onClick={() => studio.zoom(2, studio.cursor.value ?? undefined)}>−</button>
        <button type="button" disabled={!studio.window.value} onClick={() => studio.zoom(Infinity)}>Whole</button>
      </div>
      <output id="readout" aria-live="polite">
        {field && studio.cursor.value
          ? <><b class="n">{pairText(studio)}</b> <span>{`after ${plural(lit, "layer")} ${field.position} has read ${grouped(read)} of ${grouped(n)} (${percent(read / n)})`}{studio.pinned.value ? " · held" : ""}</span></>
          : <span>Point at a row to see what it has read. Click holds it; the arrow keys walk.</span>}
      </output>
    </div>
  );
}

function pairText(studio) {
  const { query, key } = studio.cursor.value;
  const tokens = studio.view.value.tokens;
  const name = (position) => (tokens[position] ? `${position} “${tokens[position]}”` : `${position}`);
  const run = studio.field.value.position === query && studio.field.value.runs.find(([first, last]) => first <= key && key < last);
  const { followed } = studio.field.value;
  const end = followed < studio.depth.value ? `not in ${plural(followed, "layer")}` : "never";
  const when = !run ? (studio.field.value.position === query ? end : "…") : run[2] === 0 ? "itself" : run[2] === 1 ? "in one layer" : `in ${plural(run[2], "layer")}`;
  return `${name(query)} ← ${name(key)}: ${when}`;
}

function Status({ studio }) {
  const { kind, text } = studio.message.value;
  const waiting = studio.waiting.value;
  const closed = studio.status.value === "closed";
  return (
    <footer>
      <p class={closed ? "error" : kind} role={closed || kind === "error" ? "alert" : "status"}>{closed ? studio.reason.value : text || (studio.guest.value ? GUEST : "")}</p>
      <p class="working">
        {waiting && !closed ? waitingText(waiting, studio) : null}
      </p>
      <p class="n timing" title="From an action to its picture">{studio.redrawn.value === null ? "" : `${studio.redrawn.value.toFixed(0)} ms`}</p>
      <p class={`lamp ${studio.status.value}`}><span class="sr">{{ open: "connected", connecting: "connecting", closed: "not connected" }[studio.status.value]}</span></p>
    </footer>
  );
}

function waitingText(waiting, studio) {
  if (!studio.view.value) return "starting";
  return <>computing {NAMES[waiting] ?? waiting} <button type="button" onClick={studio.stop}>Stop</button></>;
}

function Ended({ reason }) {
  return (
    <div class="ended" role="alert">
      <h1><span>attnflow</span> studio</h1>
      <p>{reason}</p>
    </div>
  );
}
