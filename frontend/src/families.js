// The state of the screen of families: what was asked, what the server said, which node is looked at.

import { batch, computed, signal } from "@preact/signals";

const PAUSE = 140; // milliseconds without a key before what was typed is asked

export function createFamilies(studio) {
  const state = {
    list: signal(null),
    name: signal(""),
    settings: signal({}),
    text: signal(""),
    pairs: signal([]),
    reply: signal(null),
    error: signal(""),
    step: signal(0), // the node of the proof
    hover: signal(null), // the node under the pointer
  };
  let number = 0;
  let timer = 0;

  state.entry = computed(() => state.list.value?.families.find((each) => each.name === state.name.value));
  state.here = computed(() => {
    const nodes = state.reply.value?.nodes ?? [];
    return Math.min(state.hover.value ?? state.step.value, Math.max(0, nodes.length - 1));
  });
  state.node = computed(() => state.reply.value?.nodes[state.here.value] ?? null);
  state.leak = computed(() => {
    const first = state.node.value?.leaks[0];
    return first === undefined ? null : state.reply.value.leaks[first];
  });

  async function ask() {
    const mine = ++number;
    const message = { op: "family", name: state.name.value, text: state.text.value, settings: state.settings.value, pairs: state.pairs.value };
    const reply = await studio.ask(message);
    studio.waiting.value = null;
    if (mine !== number) return; // something else has been asked since
    batch(() => {
      state.error.value = reply.ok ? "" : reply.error;
      if (!reply.ok) return;
      if (reply.leaks.length) state.step.value = reply.merged[reply.leaks[0].position].node;
      else if (reply.nodes.length !== state.reply.value?.nodes.length) state.step.value = firstLabelled(reply);
      state.pairs.value = reply.pairs;
      state.hover.value = null;
      state.reply.value = reply;
    });
  }

  function soon() {
    clearTimeout(timer);
    timer = setTimeout(ask, PAUSE);
  }

  return Object.assign(state, {
    async open() {
      if (state.list.value) return;
      const list = await studio.ask({ op: "families" });
      studio.waiting.value = null;
      if (!list.ok) return void (state.error.value = list.error);
      state.list.value = list;
      state.text.value = list.text;
      state.choose("butterfly");
    },
    choose(name) {
      batch(() => {
        state.name.value = name;
        state.settings.value = {};
        state.pairs.value = [];
      });
      ask();
    },
    set(parameter, value) {
      state.settings.value = { ...state.settings.value, [parameter]: value };
      state.pairs.value = [];
      soon();
    },
    type(text) {
      state.text.value = text;
      state.pairs.value = [];
      soon();
    },
    toggle(query, key) {
      const rest = state.pairs.value.filter(([q, k]) => q !== query || k !== key);
      state.pairs.value = rest.length < state.pairs.value.length ? rest : [...rest, [query, key]];
      ask();
    },
    clear() {
      state.pairs.value = [];
      ask();
    },
    go(step) {
      const last = (state.reply.value?.nodes.length ?? 1) - 1;
      state.hover.value = null;
      state.step.value = Math.max(0, Math.min(last, step));
    },
  });
}

/** The proof begins where something is predicted. */
const firstLabelled = (reply) => Math.max(0, reply.nodes.findIndex((node) => node.labels.length));
