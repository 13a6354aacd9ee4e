// The state of the screen of the model: what was asked of it, what came, what is at work.

import { batch, signal } from "@preact/signals";

export const VIEWS = ["audit", "geometry", "bias", "trace", "entry", "why"];
const QUESTIONS = [...VIEWS, "passages", "without"];
export const ABLATED = 8; // entries of a token that are taken out one by one

export function createModel(studio) {
  const state = {
    info: signal(null), // null until the model has been read; {model: null} without one
    error: signal(""),
    text: signal(""),
    tab: signal("audit"),
    busy: signal(null), // what is at work
    fields: { entry: signal(""), of: signal(""), layer: signal("0"), head: signal("0") }, // as typed
    isOut: signal(false), // whether the entry of the page is taken out
    isAblated: signal(false), // whether the strongest entries of a traced token are
    results: Object.fromEntries(QUESTIONS.map((name) => [name, signal({ value: null, error: "", text: null })])),
  };

  // One thing at a time: a second one would wait for the first, and look as if it were at work.
  async function ask(message) {
    if (state.busy.value) return null;
    batch(() => {
      state.busy.value = message.op;
      studio.progress.value = null;
    });
    const reply = await studio.ask(message, true);
    batch(() => {
      state.busy.value = null;
      studio.progress.value = null;
    });
    return reply;
  }

  async function answerTo(name, more, text) {
    const old = state.results[name].value;
    const ablate = name === "trace" && state.isAblated.value ? { ablate: ABLATED } : {};
    const reply = await ask({ op: name, text, ...ablate, ...more });
    if (!reply) return;
    state.results[name].value = reply.ok ? { value: reply, error: "", text } : { ...old, error: reply.error };
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

  function typed(name) {
    const { entry, of, layer, head } = state.fields;
    if (name === "entry") return entry.value.trim() ? { entry: number(entry.value), ...(of.value.trim() ? { layer: number(of.value) } : {}) } : {};
    if (name !== "why") return {};
    const { value, text } = state.results.why.value;
    const place = value && text === state.text.value ? { query: value.query, key: value.key } : {};
    return { layer: number(layer.value), head: number(head.value), ...place };
  }

  return Object.assign(state, {
    async open() {
      if (state.info.value) return;
      state.error.value = "";
      const reply = await ask({ op: "model" });
      if (!reply) return;
      if (!reply.ok) return void (state.error.value = reply.error);
      state.info.value = reply;
      state.text.value = reply.text ?? "";
      state.fields.layer.value = `${Math.floor((reply.layers ?? 0) / 2)}`; // the first reads nothing but the embedding
    },
    /** Ask the question of a view about the text of the left side. */
    run: (name) => answerTo(name, typed(name), state.text.value),
    /** Ask for a part of what is shown: another layer, token or head of the same text. */
    choose: (name, more) => answerTo(name, more, state.results[name].value.text),
    /** Open the page of an entry {entry, layer, head}, at a token of a text. */
    async openEntry({ entry, layer, head }, position, text) {
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
