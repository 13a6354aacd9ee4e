// The page of `attnflow studio`: connects, mounts, listens to the keys that work everywhere.

import { render } from "preact";
import { Page } from "./page.jsx";
import { fragment, remember, socketTransport } from "./socket.js";
import { createStudio } from "./studio.js";

const { token, design } = fragment();
const studio = createStudio();
const transport = socketTransport(token, {
  onReply: studio.answer,
  onOpen: () => studio.start(transport, { design, remember: (plain) => remember(token, plain) }),
  onClosed: studio.close,
});

const TOOLS = { v: "look", a: "allow", f: "forbid" };

addEventListener("keydown", (event) => {
  const typing = event.target.matches?.("input:not([type=radio], [type=range], [type=checkbox]), select, textarea");
  if ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "z" && !typing) {
    event.preventDefault();
    studio.act(event.shiftKey ? "redo" : "undo");
  } else if (!typing && !event.ctrlKey && !event.metaKey && !event.altKey && event.key in TOOLS) studio.tool.value = TOOLS[event.key];
});

render(<Page studio={studio} />, document.getElementById("studio"));
