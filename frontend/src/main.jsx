// Opens the page of `attnflow studio`: its style, its socket, its keys.

import { render } from "preact";
import { Page } from "./page.jsx";
import { fragment, remember, socketTransport } from "./socket.js";
import style from "./studio.css";
import { createStudio } from "./studio.js";

const TOOLS = { v: "look", a: "allow", f: "forbid" };

function openPage(root) {
  const sheet = new CSSStyleSheet(); // an object, which a policy against inline styles allows
  sheet.replaceSync(style);
  document.adoptedStyleSheets = [...document.adoptedStyleSheets, sheet];
  const { token, design, place } = fragment();
  const studio = createStudio();
  const transport = socketTransport(token, Boolean(design), {
    onReply: studio.answer,
    onOpen: () => studio.start(transport, { design, place, remember: (plain, here) => remember(token, plain, here) }),
    onClosed: studio.close,
  });
  addEventListener("popstate", () => studio.goTo(fragment().place));
  addEventListener("keydown", keysOf(studio));
  render(<Page studio={studio} />, root);
}

const keysOf = (studio) => (event) => {
  if (event.key === "Escape" && studio.candidate.peek()) return void studio.consider(null);
  const typing = event.target.matches?.("input:not([type=radio], [type=range], [type=checkbox]), select, textarea");
  if ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "z" && !typing) {
    event.preventDefault();
    studio.act(event.shiftKey ? "redo" : "undo");
  } else if (!typing && !event.ctrlKey && !event.metaKey && !event.altKey && event.key in TOOLS) studio.tool.value = TOOLS[event.key];
};

openPage(document.getElementById("studio"));
