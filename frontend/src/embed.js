// A root of one's own inside somebody else's document: neither's styles reach the other, and it is as light or dark as that.

import style from "./studio.css";

/** The style sheet as an object, which a policy against inline styles allows. */
export function sheet() {
  const made = new CSSStyleSheet();
  made.replaceSync(style);
  return made;
}

/** {root, remove()}: a shadow root in `element`, in the colours of what it stands on. */
export function embed(element) {
  const host = document.createElement("div");
  host.dataset.lmSuppressShortcuts = "true"; // JupyterLab takes letters for commands otherwise
  element.append(host);
  const shadow = host.attachShadow({ mode: "open" });
  shadow.adoptedStyleSheets = [sheet()];
  const root = document.createElement("div");
  root.className = "root";
  shadow.append(root);
  const follow = () => {
    const theme = isDark(element) ? "dark" : "light";
    if (host.dataset.theme === theme) return;
    host.dataset.theme = theme;
    document.dispatchEvent(new Event("themechange"));
  };
  const later = () => requestAnimationFrame(follow);
  const watch = new MutationObserver(later);
  for (const each of [document.documentElement, document.body]) watch.observe(each, { attributes: true });
  const scheme = matchMedia("(prefers-color-scheme: dark)");
  scheme.addEventListener("change", later);
  follow();
  later(); // where the element is not in the document yet
  return {
    root,
    remove() {
      watch.disconnect();
      scheme.removeEventListener("change", later);
      host.remove();
    },
  };
}

/** Whether what lies behind an element is dark. */
function isDark(element) {
  const context = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  for (let here = element; here; here = here.parentNode ?? here.host) {
    if (!(here instanceof Element)) continue;
    context.clearRect(0, 0, 1, 1);
    context.fillStyle = getComputedStyle(here).backgroundColor; // in any notation of colours
    context.fillRect(0, 0, 1, 1);
    const [red, green, blue, alpha] = context.getImageData(0, 0, 1, 1).data;
    if (alpha > 127) return 0.2126 * red + 0.7152 * green + 0.0722 * blue < 128;
  }
  return matchMedia("(prefers-color-scheme: dark)").matches;
}
