// The state of the screen of the model: what was asked of it, what came, what is at work.

import { batch, computed, signal } from "@preact/signals";
import { createPane, QUICK } from "./prompt.js";

export const VIEWS = ["why", "trace", "entry", "audit", "geometry", "bias"];
const QUESTIONS = [...VIEWS, "passages", "without"];
export const ABLATED = 8; // entries of a token that are taken out one by one

export function createModel(studio) {
  const state = {
    info: signal(null), // null until the model has been read; {model: null} without one
    error: signal(""),
    panes: signal([]), // the prompts: one, or two that are compared
    active: signal(0), // the one that the cards and the views below are about
    tab: signal("why"),
    busy: signal(null), // what is at work
    seconds: signal({}), // that the last answer to each operation took
    fields: { entry: signal(""), of: signal(""), layer: signal(""), head: signal("") }, // as typed
    place: signal({}), // the query and key of the line that is looked at
    isOut: signal(false), // whether the entry of the page is taken out
    isAblated: signal(false), // whether the strongest entries of a traced token are
    results: Object.fromEntries(QUESTIONS.map((name) => [name, signal({ value: null, error: "", text: null })])),
  };

  const begin = (place) => createPane(state, 0).begin(place);
  state.panes.value = [begin(studio.place), ...(studio.place.second ? [createPane(state, 1).begin({ text: studio.place.second })] : [])];
  if (VIEWS.includes(studio.place.view)) state.tab.value = studio.place.view;
  state.pane = computed(() => state.panes.value[Math.min(state.active.value, state.panes.value.length - 1)]);
  state.text = computed(() => state.pane.value.text.value);
  state.here = computed(() => ({ ...state.panes.value[0].here.value, second: state.panes.value[1]?.text.value, view: state.tab.value }));

  // One thing at a time; of what waits in a slot, only the last is asked, and what it replaces is answered null.
  const waiting = new Map();
  let isAsking = false;

  function queue(message, slot) {
    waiting.get(slot)?.resolve(null);
    waiting.delete(slot);
    return new Promise((resolve) => {
      waiting.set(slot, { message, resolve });
      if (!isAsking) drain();
    });
  }

  async function drain() {
    isAsking = true;
    while (waiting.size) {
      const [[slot, { message, resolve }]] = waiting;
      waiting.delete(slot);
      batch(() => {
        state.busy.value = message.op;
        studio.progress.value = null;
      });
      const start = performance.now();
      const reply = await studio.ask(message, true);
      if (reply.ok) state.seconds.value = { ...state.seconds.value, [message.op]: (performance.now() - start) / 1000 };
      resolve(reply);
    }
    isAsking = false;
    batch(() => {
      state.busy.value = null;
      studio.progress.value = null;
    });
  }

  const ask = (message) => queue(message, "view");

  async function answerTo(name, more, text) {
    const old = state.results[name].value;
    const said = state.pane.value.said.value;
    const ablate = name === "trace" && state.isAblated.value ? { ablate: ABLATED } : {};
    const reply = await ask({ op: name, text, said, ...ablate, ...more });
    if (!reply) return;
    if (name === "why" && reply.ok) state.place.value = { text, layer: reply.layer, head: reply.head, query: reply.query, key: reply.key };
    const asked = JSON.stringify([typed(name), text, said]);
    state.results[name].value = reply.ok ? { value: reply, error: "", text, asked } : { ...old, error: reply.error, asked };
    if (name === "entry" && reply.ok && state.isOut.value) await askEntry("without");
  }

  /** Ask about the entry of the page: "passages" or "without". */
  function askEntry(name) {
    const { value, text } = state.results.entry.value;
    const { entry, layer, head, position } = value;
    return answerTo(name, { entry, layer, head, position }, text);
  }

  // A whole number as typed; anything else goes as text, and the server says what it expects.
  const number = (text) => (/^-?\d{1,15}$/.test(text.trim()) ? Number(text) : text);

  // The token and the line that were looked at last, in the picture or in a view: of this text, or nothing.
  const here = () => (state.place.value.text === state.text.value ? state.place.value : {});
  const at = (position) => (position === undefined ? {} : { position });

  function typed(name) {
    const { entry, of, layer, head } = state.fields;
    const { query, key, ...line } = here();
    if (name === "trace") return at(query);
    if (name === "entry") return { ...(entry.value.trim() ? { entry: number(entry.value), ...(of.value.trim() ? { layer: number(of.value) } : {}) } : {}), ...at(query) };
    if (name !== "why") return {};
    const asked = { layer: layer.value.trim() ? number(layer.value) : middle(), ...(head.value.trim() ? { head: number(head.value) } : {}) };
    // Another head looks elsewhere: the key of the one before says nothing of it.
    const isSame = asked.layer === line.layer && asked.head === line.head;
    return { ...asked, ...(query === undefined ? {} : { query }), ...(isSame && key !== undefined ? { key } : {}) };
  }

  const middle = () => Math.floor((state.info.value?.layers ?? 0) / 2); // the first reads nothing but the embedding

  /** Whether a view is answered without being asked for. */
  const isQuick = (name) => (state.seconds.value[name] ?? (["audit", "geometry"].includes(name) ? Infinity : (state.seconds.value.explain ?? Infinity))) < QUICK;

  return Object.assign(state, {
    async open() {
      if (state.info.value) return;
      state.error.value = "";
      const reply = await ask({ op: "model" });
      if (!reply) return;
      if (!reply.ok) return void (state.error.value = reply.error);
      state.info.value = reply;
      if (!reply.model) return;
      for (const pane of state.panes.value) {
        if (!pane.text.value) pane.text.value = reply.text;
        await pane.refresh(true);
      }
      await state.refresh();
      if (!state.results.geometry.value.value && reply.layers) await answerTo("geometry", {}, state.text.value);
    },
    queue,
    isQuick,
    count: studio.count,
    showMask: () => (studio.screen.value = "mask"),
    /** Let the views below look at the line or entry that was chosen above, and answer the open one if that is quick. */
    share(pane, item) {
      if (pane !== state.pane.value || !item) return;
      batch(() => {
        const text = pane.text.value;
        if (item.half) state.place.value = {};
        else if (item.entry !== undefined) {
          [state.fields.entry.value, state.fields.of.value] = [`${item.entry}`, `${item.layer}`];
          state.place.value = { text, query: item.position };
        } else {
          [state.fields.layer.value, state.fields.head.value] = [`${item.layer}`, `${item.head}`];
          state.place.value = { text, layer: item.layer, head: item.head, query: item.query, key: item.key };
        }
      });
    },
    /** Answer the view that is open, unless that takes long or nothing was asked since. */
    async refresh() {
      const name = state.tab.value;
      const { value, asked } = state.results[name].value;
      if (!state.info.value?.model || !isQuick(name) || (name === "bias" && !state.info.value.bias)) return;
      if (!value || (name !== "geometry" && asked !== JSON.stringify([typed(name), state.text.value, state.pane.value.said.value]))) await state.run(name);
    },
    /** Look at the strongest line of a head; where none is listed, at why it attends as it does. */
    pickHead(layer, head) {
      const pane = state.pane.value;
      const line = pane.flow.value.value?.edges.find((edge) => edge.layer === layer && edge.head === head && !edge.half);
      if (line) return pane.choose(line);
      batch(() => {
        [state.fields.layer.value, state.fields.head.value] = [`${layer}`, `${head}`];
        state.tab.value = "why";
      });
      return state.run("why");
    },
    goTo(place) {
      if (VIEWS.includes(place.view)) state.tab.value = place.view;
      return state.panes.value[0].goTo(place);
    },
    openTab(name) {
      state.tab.value = name;
      return state.refresh();
    },
    activate(number) {
      state.active.value = number;
      state.share(state.pane.value, state.pane.value.chosen.value);
    },
    /** Put a second prompt beside the first. */
    compare() {
      const [first] = state.panes.value;
      const pane = createPane(state, 1, first.text.value);
      [pane.answer.value, pane.against.value] = [first.answer.value, first.against.value];
      state.panes.value = [first, pane];
      state.active.value = 1;
      return pane.refresh();
    },
    close() {
      state.panes.value = state.panes.value.slice(0, 1);
      state.activate(0);
    },
    /** Ask the question of a view about the text of the left side. */
    run: (name) => answerTo(name, typed(name), state.text.value),
    /** Ask for a part of what is shown: another layer, token or head of the same text. */
    choose: (name, more) => answerTo(name, more, state.results[name].value.text),
    /** Open the page of an entry {entry, layer, head}, at a token of a text. */
    async openEntry({ entry, layer, head }, position, text = state.text.value) {
      state.tab.value = "entry";
      batch(() => {
        state.fields.entry.value = `${entry}`;
        state.fields.of.value = `${layer}`;
      });
      await answerTo("entry", { entry, layer, head, position }, text);
    },
    /** Take the entry of the page out, at the token that is chosen there, or put it back. */
    async takeOut(isOut) {
      state.isOut.value = isOut;
      if (isOut) await askEntry("without");
    },
    /** Take the strongest entries of the traced token out one by one, or show their direct effects alone. */
    ablate(isAblated) {
      state.isAblated.value = isAblated;
      return state.choose("trace", { position: state.results.trace.value.value.position });
    },
    findPassages: () => askEntry("passages"),
    stop: studio.stopModel,
  });
}
