// The state of a prompt: its answer, the flow that made it, the line or entry that is looked at, what was taken out.

import { batch, computed, signal } from "@preact/signals";

const PAUSE = 350; // milliseconds without a key before what was typed is answered
export const QUICK = 2; // seconds up to which an answer comes without being asked for
const PLACE = ["layer", "head", "query", "key"];

export const placeOf = ({ layer, head, query, key, half, entry, position }) => (entry === undefined ? { layer, head, query, key, half: half ?? "" } : { layer, entry, position, half: half ?? "" });
/** The tokens of a line or entry, each as [whether it is of the encoder, position]. */
export function endsOf(item) {
  const isEncoder = item.half === "encoder";
  if (item.at !== undefined || item.entry !== undefined) return [[isEncoder, item.at ?? item.position]];
  return [[isEncoder || item.half === "cross", item.key], [isEncoder, item.query]];
}

/** Whether what is pointed at, `hover`, is this line or entry; a head alone is all its lines, a token all that touches it. */
export function isLit(item, hover) {
  if (!hover || (hover.half !== undefined && hover.at === undefined && hover.half !== (item.half ?? ""))) return false;
  if (hover.at !== undefined) return endsOf(item).some(([isEncoder, at]) => isEncoder === (hover.half === "encoder") && at === hover.at);
  if (hover.layer !== item.layer || hover.entry !== item.entry) return false;
  if (hover.entry !== undefined) return hover.isEcho || hover.position === item.position;
  return hover.head === item.head && (hover.isEcho || hover.query === undefined || sameLine(item, hover));
}

export const sameLine = (a, b) => Boolean(a && b) && PLACE.every((name) => a[name] === b[name]) && (a.half ?? "") === (b.half ?? "") && a.entry === b.entry && a.position === b.position;

/** One prompt of `model`; `number` tells it from the one beside it. */
export function createPane(model, number, text = "") {
  const pane = {
    number,
    text: signal(text),
    said: signal(""), // what the decoder of an encoder-decoder begins with
    answer: signal(""), // the number of a token, or a text; the likeliest one
    against: signal(""),
    position: signal(null),
    likely: signal({ value: null, error: "", text: null }),
    flow: signal({ value: null, error: "", asked: null }),
    chosen: signal(null), // the line or entry that is looked at
    hover: signal(null), // a line, an entry, a head {layer, head} or a token {at, half}
    other: signal(null), // the key with which the chosen line's is compared
    detail: signal({ value: null, error: "" }),
    taken: signal([]),
    removal: signal({ value: null, error: "" }),
    wanted: null, // the line of an address, until there is a flow
  };
  let timer = 0; // until the hand rests, which counts as work that waits
  const rest = () => {
    if (timer) model.count(-1);
    clearTimeout(timer);
    timer = 0;
  };
  const slot = (name) => `${name} ${number}`;
  const message = () => ({ text: pane.text.value, said: pane.said.value, answer: pane.answer.value, against: pane.against.value.trim(), position: pane.position.value });
  const key = () => JSON.stringify(message());
  // What is pointed at here, or the same head, entry or token as in the other picture.
  pane.lit = computed(() => {
    const other = model.panes.value.find((one) => one !== pane)?.hover.value;
    return pane.hover.value ?? (other ? { ...other, half: other.half ?? "", isEcho: true } : null);
  });
  pane.isStale = computed(() => pane.flow.value.asked !== null && pane.flow.value.asked !== JSON.stringify(message()));
  pane.isQuick = computed(() => (model.seconds.value.explain ?? 0) < QUICK);

  // What the address holds of it.
  pane.here = computed(() => {
    const { half, ...place } = pane.chosen.value ? placeOf(pane.chosen.value) : (pane.wanted ?? {});
    const { position, ...line } = place;
    const at = position === undefined ? {} : { at: position };
    return { text: pane.text.value, said: pane.said.value || undefined, answer: pane.answer.value, against: pane.against.value, position: pane.position.value, ...line, half, ...at };
  });

  async function look() {
    const chosen = pane.chosen.value;
    const asked = pane.flow.value.asked;
    if (!chosen || !asked) return;
    pane.detail.value = { ...pane.detail.value, error: "" };
    const isEntry = chosen.entry !== undefined;
    const other = isEntry || pane.other.value === null ? {} : { other: pane.other.value };
    const reply = await model.queue({ op: isEntry ? "fired" : "edge", ...JSON.parse(asked), ...placeOf(chosen), ...other }, slot("look"));
    if (!reply || !sameLine(pane.chosen.value, chosen)) return;
    pane.detail.value = reply.ok ? { value: reply, of: chosen, error: "" } : { value: null, error: reply.error };
  }

  async function explain() {
    rest();
    const asked = key();
    const reply = await model.queue({ op: "explain", ...message() }, slot("explain"));
    if (!reply) return;
    if (asked !== key() && !reply.ok) return; // something else was typed meanwhile
    if (!reply.ok) return void (pane.flow.value = { ...pane.flow.value, error: reply.error });
    const isSame = pane.flow.value.asked !== null && JSON.parse(pane.flow.value.asked).text === JSON.parse(asked).text;
    batch(() => {
      pane.flow.value = { value: reply, error: "", asked };
      pane.removal.value = { value: null, error: "" };
      pane.taken.value = [];
      pane.hover.value = null;
    });
    const known = [...reply.edges, ...reply.entries].find((item) => sameLine(item, pane.wanted ?? (isSame ? pane.chosen.value : null)));
    pane.choose(known ?? (pane.wanted?.layer === undefined ? telling(reply) : { ...pane.wanted, half: pane.wanted.half ?? "" }), pane.other.value);
    pane.wanted = null;
  }

  async function guess() {
    const { text, said, position } = message();
    const reply = await model.queue({ op: "next", text, said, position }, slot("next"));
    if (reply) pane.likely.value = reply.ok ? { value: reply, error: "", text } : { ...pane.likely.value, error: reply.error };
    return reply?.ok;
  }

  const whole = (value) => (Number.isInteger(value) ? value : null);

  return Object.assign(pane, {
    /** Take what an address says. */
    begin(place) {
      const { layer, head, query, key: sender, entry, at, half = "" } = place;
      const isEntry = whole(entry) !== null;
      batch(() => {
        pane.text.value = place.text ?? pane.text.value;
        pane.said.value = place.said ?? "";
        pane.answer.value = place.answer ?? "";
        pane.against.value = place.against ?? "";
        pane.position.value = whole(place.position);
      });
      pane.wanted = isEntry ? { layer, entry, position: whole(at), half } : [layer, head, query, sender].every((n) => whole(n) !== null) ? { layer, head, query, key: sender, half } : null;
      return pane;
    },
    async goTo(place) {
      pane.begin(place);
      if (key() !== pane.flow.value.asked) return pane.refresh(true);
      const wanted = pane.wanted;
      pane.wanted = null;
      const item = [...pane.flow.value.value.edges, ...pane.flow.value.value.entries].find((one) => sameLine(one, wanted));
      if (item && !sameLine(item, pane.chosen.value)) await pane.choose(item);
    },
    /** Say what comes next, and explain it where that is quick or `isAsked`. */
    async refresh(isAsked = false) {
      rest();
      if (!pane.text.value.trim()) return;
      const isQuick = pane.isQuick.value;
      if (!isAsked && (model.seconds.value.next ?? 0) > QUICK) return;
      if ((await guess()) && (isAsked || isQuick)) await explain();
    },
    change(values) {
      rest();
      batch(() => {
        for (const [name, value] of Object.entries(values)) pane[name].value = value;
        if ("text" in values || "said" in values) [pane.position.value, pane.answer.value] = [null, ""];
        else if ("position" in values) pane.answer.value = "";
      });
      model.count(1);
      timer = setTimeout(() => pane.refresh(), PAUSE);
    },
    explain: () => pane.refresh(true),
    choose(item, other = null) {
      batch(() => {
        pane.chosen.value = item;
        pane.other.value = other;
      });
      model.share(pane, item);
      return look().then(model.refresh);
    },
    report() {
      const { value, asked } = pane.flow.value;
      const chosen = pane.chosen.value;
      return value && model.queue({ op: "flow_report", ...JSON.parse(asked), ...(chosen && chosen.entry === undefined ? placeOf(chosen) : {}) }, slot("report"));
    },
    compareKey: (position) => pane.choose(pane.chosen.value, position),
    /** Measure what the answer loses without the chosen line or entry, and without those taken out before. */
    async takeOut(item) {
      const isOut = pane.taken.value.some((one) => sameLine(one, item));
      pane.taken.value = isOut ? pane.taken.value.filter((one) => !sameLine(one, item)) : [...pane.taken.value, item];
      if (!pane.taken.value.length) return void (pane.removal.value = { value: null, error: "" });
      const items = pane.taken.value;
      const reply = await model.queue({ op: "take_out", ...JSON.parse(pane.flow.value.asked), items: items.map(placeOf) }, slot("take"));
      if (reply && pane.taken.value === items) pane.removal.value = reply.ok ? { value: { ...reply, items }, error: "" } : { value: null, error: reply.error };
    },
  });
}

/** The line to begin with: the one that carries most to the answer. */
export const telling = (flow) => flow.edges.find((edge) => edge.half !== "encoder" && (flow.position === null || edge.query === flow.position)) ?? flow.edges[0] ?? null;
