// A search box over the table of model classes: "Does it work with my model?"
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
  const show = () => {
    const wanted = box.value.toLowerCase().replace(/[^a-z0-9]/g, "");
    const found = rows.filter((row) => {
      row.hidden = !row.cells[0].textContent.toLowerCase().replace(/[^a-z0-9]/g, "").includes(wanted);
      return !row.hidden;
    });
    count.textContent = wanted ? `${found.length} of ${rows.length} classes` : `${rows.length} classes`;
  };
  box.addEventListener("input", show);
  const title = document.querySelector(".md-content h1");
  title.after(box, count);
  box.addEventListener("keydown", (event) => event.key === "Enter" && table.scrollIntoView());
  show();
});
