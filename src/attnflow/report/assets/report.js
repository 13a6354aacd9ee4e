"use strict";
(() => {
  const root = document.documentElement;
  const button = document.querySelector("button[data-theme-toggle]");
  if (button) {
    const dark = () =>
      (root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
    const show = () => { button.textContent = dark() ? "Light" : "Dark"; };
    button.hidden = false;
    show();
    button.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; show(); });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
  }
  const digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
  const span = (noun, first, step, count) => {
    const last = Math.min(first + step, count) - 1;
    return last === first ? `${noun} ${first}` : `${noun}s ${first}–${last}`.replace("querys", "queries");
  };
  for (const svg of document.querySelectorAll("svg[data-cells]")) {
    const out = svg.closest("figure").querySelector("output");
    const [queries, keys] = svg.dataset.shape.split(" ").map(Number);
    const [queryStep, keyStep] = svg.dataset.step.split(" ").map(Number);
    const [left, top, side] = svg.dataset.box.split(" ").map(Number);
    const columns = Math.ceil(keys / keyStep), rows = Math.ceil(queries / queryStep);
    const read = (event) => {
      const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
      const column = Math.floor((at.x - left) / side), row = Math.floor((at.y - top) / side);
      if (column < 0 || row < 0 || column >= columns || row >= rows) { out.textContent = ""; return; }
      const share = digits.indexOf(svg.dataset.cells[row * columns + column]) / 63;
      const exact = queryStep === 1 && keyStep === 1;
      const what = share === 0 ? "not allowed" : share === 1 ? "allowed" : `about ${Math.round(100 * share)} % allowed`;
      const where = `${span("query", row * queryStep, queryStep, queries)}, ${span("key", column * keyStep, keyStep, keys)}`;
      out.textContent = `${where}: ${exact || share === 0 || share < 1 ? what : "all allowed"}`;
    };
    svg.addEventListener("pointermove", read);
    svg.addEventListener("pointerdown", read);
    svg.addEventListener("pointerleave", () => { out.textContent = ""; });
  }
})();
