// The one module of all three places: a page of `attnflow studio` and the records in a report mount themselves where they
// find their element; a notebook calls `render`.

import { render } from "preact";
import { commTransport } from "./comm.js";
import { embed, sheet } from "./embed.js";
import { Page } from "./page.jsx";
import { Reader } from "./reader.jsx";
import { recordTransport } from "./record.js";
import { fragment, remember, socketTransport } from "./socket.js";
import { createStudio } from "./studio.js";

const TOOLS = { v: "look", a: "allow", f: "forbid" };

function openPage(root) {
  document.adoptedStyleSheets = [...document.adoptedStyleSheets, sheet()];
  const { token, design } = fragment();
  const studio = createStudio("page");
  const transport = socketTransport(token, Boolean(design), {
    onReply: studio.answer,
    onOpen: () => studio.start(transport, { design, remember: (plain) => remember(token, plain) }),
    onClosed: studio.close,
  });
  addEventListener("keydown", keysOf(studio));
  render(<Page studio={studio} />, root);
}

function openWidget(model, element) {
  const { root, remove } = embed(element);
  const studio = createStudio("widget");
  const transport = commTransport(model, {
    onReply: studio.answer,
    onSilence: (text) => !studio.view.peek() && (studio.message.value = { kind: "notice", text }),
    onRevision: (revision) => studio.view.peek() && studio.view.peek().revision !== revision && studio.catchUp(),
  });
  root.addEventListener("keydown", keysOf(studio));
  render(<Page studio={studio} />, root);
  studio.start(transport, {});
  return () => {
    transport.close();
    render(null, root);
    remove();
  };
}

async function openRecord(place) {
  const transport = await recordTransport(place.dataset.record, { onReply: (reply) => studio.answer(reply) });
  const studio = createStudio("report");
  studio.tab.value = transport.state.num_labels ? "leaks" : "code";
  const { root } = embed(place);
  place.hidden = false;
  for (const picture of place.parentElement.querySelectorAll("[data-attnflow-still]")) picture.hidden = true;
  render(<Reader studio={studio} hasFields={transport.hasFields} />, root);
  studio.start(transport, {});
}

const keysOf = (studio) => (event) => {
  if (event.key === "Escape" && studio.candidate.peek()) return void studio.consider(null);
  const typing = event.target.matches?.("input:not([type=radio], [type=range], [type=checkbox]), select, textarea");
  if ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "z" && !typing) {
    event.preventDefault();
    studio.act(event.shiftKey ? "redo" : "undo");
  } else if (!typing && !event.ctrlKey && !event.metaKey && !event.altKey && event.key in TOOLS) studio.tool.value = TOOLS[event.key];
};

for (const place of document.querySelectorAll("[data-attnflow-studio]"))
  (place.dataset.attnflowStudio === "record" ? openRecord : openPage)(place);

export default { render: ({ model, el }) => openWidget(model, el) };
