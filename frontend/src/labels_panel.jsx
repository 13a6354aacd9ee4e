// Tokens, labels, and what inputs are made of.

import { useSignal } from "@preact/signals";
import { grouped } from "./format.js";

export function LabelsPanel({ studio }) {
  const view = studio.view.value;
  const text = useSignal("");
  const position = useSignal("0");
  const token = useSignal("1");
  const count = view?.num_labels ?? 0;
  const at = Number(position.value);
  const isMask = view?.sources.some(([place, ...made]) => place === at && made.length === 0);
  const number = (name, state) => (
    <label class="field number">
      <span>{name}</span>
      <input type="number" min="0" max={Math.max(0, studio.size.value - 1)} value={state.value} onInput={(event) => (state.value = event.currentTarget.value)} />
    </label>
  );
  return (
    <section class="panel" aria-labelledby="labels-title">
      <h2 id="labels-title">Labels <span class="aside n">{grouped(count)}</span></h2>
      <div class="buttons" role="group" aria-label="Labels of all positions">
        <button type="button" onClick={() => studio.act("labels", { kind: "next" })}>Next token</button>
        <button type="button" onClick={() => studio.act("labels", { kind: "own" })}>Own token</button>
        <button type="button" disabled={!count} onClick={() => studio.act("labels", { kind: "none" })}>None</button>
      </div>
      <details>
        <summary>One position, tokens</summary>
        <div class="parameters">
          {number("position", position)}
          {number("token", token)}
        </div>
        <div class="buttons">
          <button type="button" onClick={() => studio.act("label", { position: at, token: Number(token.value) })}>Label on / off</button>
          <button type="button" aria-pressed={Boolean(isMask)} onClick={() => studio.act("source", { position: at, tokens: isMask ? [at] : [] })}>[MASK] there</button>
        </div>
        <label class="field">
          <span>text</span>
          <input type="text" value={text.value} placeholder="the cat sat on the mat" onInput={(event) => (text.value = event.currentTarget.value)} onChange={() => studio.act("tokens", { text: text.value })} />
        </label>
      </details>
    </section>
  );
}
