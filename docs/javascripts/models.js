// A search box over the table of model classes: "Does it work with my model?"
// While it holds a name, the page shows the box and the matching rows alone.
const plain = (text) => text.toLowerCase().replace(/[^a-z0-9]/g, "");

// Letters that are wrong, missing, too many or swapped.
const mistakes = (a, b) => {
  const rows = [[...Array(b.length + 1).keys()]];
  for (let i = 1; i <= a.length; i++) {
    rows.push([i]);
    for (let j = 1; j <= b.length; j++) {
      const swapped = i > 1 && j > 1 && a[i - 1] === b[j - 2] && a[i - 2] === b[j - 1];
      const cost = Math.min(rows[i - 1][j] + 1, rows[i][j - 1] + 1, rows[i - 1][j - 1] + (a[i - 1] !== b[j - 1]));
      rows[i].push(swapped ? Math.min(cost, rows[i - 2][j - 2] + 1) : cost);
    }
  }
  return rows[a.length][b.length];
};

// Names that contain what was typed; else those with the longest common beginning; else the fewest mistakes, at most two.
const matching = (typed, names) => {
  const wanted = plain(typed.split("/").pop());
  const exact = names.filter((name) => name.includes(wanted));
  if (exact.length) return { found: exact, near: false };
  for (let length = wanted.length - 1; length >= 4; length--) {
    const found = names.filter((name) => name.startsWith(wanted.slice(0, length)));
    if (found.length) return { found, near: true };
  }
  const distance = (name) => mistakes(wanted, name.replace(/(for|model|lmhead|decoder|encoder).*/, ""));
  const least = Math.min(...names.map(distance));
  return { found: least <= Math.min(2, wanted.length / 2.5) ? names.filter((name) => distance(name) === least) : [], near: true };
};

document.addEventListener("DOMContentLoaded", () => {
  const heading = document.getElementById("by-class");
  const table = heading && heading.parentElement.querySelector("#by-class ~ .md-typeset__scrollwrap table, #by-class ~ table");
  if (!table) return;
  const box = document.createElement("input");
  const count = document.createElement("p");
  box.type = "search";
  box.className = "models";
  box.placeholder = "Your model, such as Qwen3 or ModernBert";
  box.setAttribute("aria-label", "Search for a model class");
  count.setAttribute("role", "status");
  const rows = [...table.tBodies[0].rows];
  const names = rows.map((row) => plain(row.cells[0].textContent));
  document.querySelector(".md-content h1").after(box, count);
  const others = [];
  for (let next = count.nextElementSibling; next && next !== heading; next = next.nextElementSibling) others.push(next);
  const show = () => {
    const asked = plain(box.value) !== "";
    const { found, near } = asked ? matching(box.value, names) : { found: names, near: false };
    const wanted = new Set(found);
    rows.forEach((row, index) => { row.hidden = !wanted.has(names[index]); });
    others.forEach((element) => { element.hidden = asked; });
    const number = rows.filter((row) => !row.hidden).length;
    const classes = number === 1 ? "1 class" : `${number} classes`;
    const hint = "No class has this name. The class of a checkpoint stands in its config.json, under architectures.";
    count.textContent = !asked ? `${rows.length} classes`
      : !near ? `${classes} of ${rows.length}`
        : number ? `${hint} Similar names:` : `${hint} attnflow also audits any module of PyTorch, as the guide to audits shows.`;
  };
  box.addEventListener("input", show);
  show();
});
