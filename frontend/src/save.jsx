// Taking away what is shown: a figure as SVG or PNG, a table as CSV, the whole as a report page.

const DRAWN = ["fill", "fill-opacity", "stroke", "stroke-width", "stroke-opacity", "stroke-dasharray", "stroke-linecap", "opacity", "font-family", "font-size", "font-weight", "text-anchor"];
const SVG = "http://www.w3.org/2000/svg";

/** Buttons that save the figure or the table of the element with `data-saved` around them; `rows` gives all of a table. */
export function Save({ name, rows = null, isTable = false }) {
  const own = (event) => event.currentTarget.closest("[data-saved]");
  const file = (ending) => `attnflow-${name.toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-|-$/g, "")}.${ending}`;
  const table = (element) => rows?.() ?? rowsOf(element.querySelector("table"));
  return (
    <span class="save">
      {!isTable && <button type="button" onClick={(event) => saveText(file("svg"), svgOf(own(event)), "image/svg+xml")} aria-label={`SVG of ${name}`}>SVG</button>}
      {!isTable && <button type="button" onClick={(event) => savePicture(file("png"), own(event))} aria-label={`PNG of ${name}`}>PNG</button>}
      {(isTable || rows) && <button type="button" onClick={(event) => saveText(file("csv"), csvOf(table(own(event))), "text/csv")} aria-label={`CSV of ${name}`}>CSV</button>}
    </span>
  );
}

export function saveText(name, text, kind) {
  download(name, new Blob([text], { type: `${kind};charset=utf-8` }));
}

function download(name, blob) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

const pictureOf = (element) => element.querySelector("svg:not(.bar), canvas");

/** The figure as a file of its own: colours and fonts stand in its elements, since the page's style stays here. */
function svgOf(element) {
  const shown = pictureOf(element);
  if (shown instanceof HTMLCanvasElement) {
    const [wide, high] = [shown.clientWidth, shown.clientHeight];
    return `<svg xmlns="${SVG}" width="${wide}" height="${high}"><image width="${wide}" height="${high}" href="${shown.toDataURL()}"/></svg>`;
  }
  const copy = shown.cloneNode(true);
  const [parts, copies] = [[shown, ...shown.querySelectorAll("*")], [copy, ...copy.querySelectorAll("*")]];
  parts.forEach((part, i) => {
    const style = getComputedStyle(part);
    for (const property of DRAWN) copies[i].setAttribute(property, style.getPropertyValue(property));
    copies[i].removeAttribute("class");
    copies[i].removeAttribute("style");
  });
  const box = shown.getBoundingClientRect();
  copy.setAttribute("xmlns", SVG);
  copy.setAttribute("width", box.width);
  copy.setAttribute("height", box.height);
  if (!copy.getAttribute("viewBox")) copy.setAttribute("viewBox", `0 0 ${box.width} ${box.height}`);
  const back = document.createElementNS(SVG, "rect");
  const [x, y, wide, high] = copy.getAttribute("viewBox").split(" ");
  for (const [attribute, value] of Object.entries({ x, y, width: wide, height: high, fill: getComputedStyle(document.body).backgroundColor })) back.setAttribute(attribute, value);
  copy.prepend(back);
  return new XMLSerializer().serializeToString(copy);
}

async function savePicture(name, element) {
  const shown = pictureOf(element);
  if (shown instanceof HTMLCanvasElement) return shown.toBlob((blob) => download(name, blob));
  const image = new Image();
  image.src = URL.createObjectURL(new Blob([svgOf(element)], { type: "image/svg+xml" }));
  await image.decode();
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [2 * image.width, 2 * image.height];
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  URL.revokeObjectURL(image.src);
  canvas.toBlob((blob) => download(name, blob));
}

/** What a table shows, without its columns of bars. */
function rowsOf(table) {
  const rows = [...table.rows].map((row) => [...row.cells].flatMap((cell) => [cell, ...Array(cell.colSpan - 1).fill(null)]));
  const bars = new Set(rows.flatMap((row) => row.map((cell, i) => (cell?.querySelector(".bar") ? i : -1))));
  return rows.map((row) => row.filter((_, i) => !bars.has(i)).map((cell) => cell?.textContent.trim() ?? ""));
}

const csvOf = (rows) => rows.map((row) => row.map(cellOf).join(",")).join("\r\n");

function cellOf(value) {
  const text = `${value ?? ""}`.replaceAll("\u202f", "").replace(/^\u2212/, "-");
  return /[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}
