// The first screen: what is drawn, the matrix, what follows.

import { useSignalEffect } from "@preact/signals";
import { Answers, CopyButton, Legend, Order } from "./answers.jsx";
import { grouped, percent, plural } from "./format.js";
import { Hasse } from "./hasse.jsx";
import { LabelsPanel } from "./labels_panel.jsx";
import { BrushPanel, FileButton, LayersPanel, MaskPanel } from "./mask_panel.jsx";
import { Matrix } from "./matrix.jsx";
import { Save, saveText } from "./save.jsx";
import { Screen, ScreenTabs } from "./screens.jsx";

const NAMES = { report: "the report",  families: "the families", family: "the family", flow: "the order", diagram: "the Hasse diagram", leaks: "the leaks", blocks: "the blocks", tile: "the picture", restore: "the design of the link", load: "the file" };

const GUEST = "This link is from an earlier run of the studio; its design is open here.";

export function Page({ studio }) {
  useSignalEffect(() => {
    const layer = studio.view.value?.layers[0];
    const subject = studio.screen.value === "prompt" ? studio.modelName.value : layer?.title;
    if (subject) document.title = `${subject.slice(0, 60)} · attnflow studio`;
  });
  if (studio.status.value === "closed" && !studio.view.value) return <Ended reason={studio.reason.value} />;
  return (
    <div class={studio.status.value === "closed" ? "page closed" : "page"} data-settled={studio.asked.value === 0 && studio.view.value !== null} data-linked={studio.linked.value} data-span={studio.window.value?.span ?? studio.size.value}>
      <Bar studio={studio} />
      {studio.screen.value === "mask" ? <MaskScreen studio={studio} /> : studio.screen.value ? <Screen studio={studio} /> : <main />}
      <Status studio={studio} />
    </div>
  );
}

function MaskScreen({ studio }) {
  return (
    <main>
      <div class="side" aria-label="Design" role="group">
        <Purpose studio={studio} />
        <MaskPanel studio={studio} />
        <LayersPanel studio={studio} />
        <BrushPanel studio={studio} />
        <LabelsPanel studio={studio} />
      </div>
      <div class="centre" data-saved>
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

/** What the screen is for, to who sees it first. */
function Purpose({ studio }) {
  const isWelcome = studio.view.value?.tokens.join(" ") === WELCOME;
  return (
    <details class="panel purpose" open={isWelcome}>
      <summary>What this is for</summary>
      <p>Draw who may attend to whom, and see at once where information can flow, through how many layers, and which label leaks.{isWelcome ? " This one: two packed documents of six tokens each. “.” may read “We”, the first token of the next document, which it must predict: a leak." : ""}</p>
    </details>
  );
}

const WELCOME = "The cat sat down here . We like hot black tea !";

function Bar({ studio }) {
  const view = studio.view.value;
  const onMask = studio.screen.value === "mask";
  return (
    <header>
      <h1><span>attnflow</span> studio</h1>
      <ScreenTabs studio={studio} />
      <span class="subject" title={onMask ? view?.layers[studio.layer.value]?.title : undefined}>{onMask ? (view ? `${grouped(view.size)} positions` : "") : studio.screen.value === "prompt" ? studio.modelName.value : ""}</span>
      <div class="tools">
        {onMask && <MaskTools studio={studio} view={view} />}
        {studio.screen.value !== "families" && <ReportButton studio={studio} />}
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

/** The whole as one page, which needs neither the studio nor a network. */
function ReportButton({ studio }) {
  const onMask = studio.screen.value === "mask";
  const pane = studio.opened.value ? studio.model.pane.value : null;
  const isReady = onMask ? studio.view.value : pane?.flow.value.value;
  const save = async () => {
    const reply = onMask ? await studio.ask({ op: "report" }) : await pane.report();
    studio.waiting.value = null;
    if (!reply) return;
    if (!reply.ok) studio.message.value = { kind: "error", text: reply.error };
    else saveText(`attnflow-${onMask ? "mask" : "prompt"}.html`, reply.html, "text/html");
  };
  return <button type="button" disabled={!isReady} onClick={save} title="The whole as one file">Save report</button>;
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

/** What marks beside the rows mean. */
function marksOf(studio) {
  const leaks = studio.answers.leaks.value.value;
  if (!studio.view.value?.num_labels || !leaks) return [];
  return [["dot", "has a label"], ...(leaks.total ? [["dot leaks", "its label leaks"]] : []), ...(leaks.num_dead ? [["dash", "dead: no label reads it"]] : [])];
}

function Readout({ studio }) {
  const most = studio.maxLayers.value;
  const field = studio.field.value;
  const lit = Math.min(studio.lit.value, field?.followed ?? Infinity);
  const read = field ? field.runs.reduce((sum, [first, last, layer]) => sum + (layer <= lit ? last - first : 0), 0) : 0;
  const n = studio.size.value;
  return (
    <div class="reading">
      <Legend items={legendOf(studio)} marks={marksOf(studio)} />
      <label class="slider">
        <span>Layers</span>
        <input type="range" aria-label="Layers" min="0" max={most} value={studio.lit.value} aria-valuetext={`after ${studio.lit.value} of ${studio.depth.value} layers`} onInput={(event) => (studio.layers.value = Number(event.currentTarget.value))} />
        <output class="n">{grouped(studio.lit.value)} / {grouped(studio.depth.value)}</output>
      </label>
      <div class="buttons zoom" role="group" aria-label="Zoom">
        <button type="button" aria-label="Zoom in" onClick={() => studio.zoom(0.5, studio.cursor.value ?? undefined)}>+</button>
        <button type="button" aria-label="Zoom out" onClick={() => studio.zoom(2, studio.cursor.value ?? undefined)}>−</button>
        <button type="button" disabled={!studio.window.value} onClick={() => studio.zoom(Infinity)}>Whole</button>
        <Save name="mask" />
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
