// The socket of a page: the token first, then messages; replies find their questions by number.

const REASONS = {
  4400: "The page said something that the studio does not understand. Reload it.",
  4401: "This address lacks the token of the studio that runs now. Open the address that `attnflow studio` printed.",
  4429: "As many pages as the studio serves are open already. Close one, then reload.",
};

/** {send(message), stop()} over a WebSocket; `onReply`, `onOpen` and `onClosed(reason)` are called.
 *
 * With an old token or none, a page may still enter as a `guest`, for a design of its own. */
export function socketTransport(token, guest, { onReply, onOpen, onClosed }) {
  const socket = new WebSocket(`ws://${location.host}/session`);
  let opened = false;
  socket.addEventListener("open", () => {
    opened = true;
    socket.send(JSON.stringify({ token, guest, page: pageName() }));
    onOpen();
  });
  socket.addEventListener("message", (event) => onReply(JSON.parse(event.data)));
  socket.addEventListener("close", (event) => {
    const ended = opened ? "The studio has ended. Start it again with `attnflow studio`." : "No studio answers at this address.";
    onClosed(REASONS[event.code] ?? ended);
  });
  return { send: (message) => socket.readyState === WebSocket.OPEN && socket.send(JSON.stringify(message)) };
}

/** The name by which the server knows this page again when it is loaded again: that of its tab. */
function pageName() {
  const known = sessionStorage.getItem("attnflow page");
  const name = known ?? crypto.randomUUID();
  sessionStorage.setItem("attnflow page", name);
  return name;
}

const NUMBERS = ["layer", "head", "query", "key", "entry", "at", "position", "answer"];

/** What the fragment of an address holds: the token, the design that a link brings, and the place that is looked at. */
export function fragment() {
  const { token = "", design = null, ...rest } = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  const place = Object.entries(rest).map(([name, text]) => [name, NUMBERS.includes(name) && /^\d{1,9}$/.test(text) ? Number(text) : text]);
  return { token, design: decoded(design), place: Object.fromEntries(place) };
}

/** Put a design and a place into the address, so that a reload or a bookmark brings them back, and Back the screen before. */
export function remember(token, design, place) {
  const values = new URLSearchParams({ token });
  for (const [name, value] of Object.entries(place)) if (value !== null && value !== undefined && value !== "") values.set(name, value);
  if (design) values.set("design", encoded(design));
  const isNew = place.screen !== undefined && history.state?.screen !== undefined && history.state.screen !== place.screen;
  history[isNew ? "pushState" : "replaceState"]({ screen: place.screen }, "", `#${values}`);
}

function encoded(text) {
  const bytes = new TextEncoder().encode(text);
  return btoa(String.fromCharCode(...bytes)).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
}

function decoded(text) {
  if (!text) return null;
  try {
    const bytes = Uint8Array.from(atob(text.replaceAll("-", "+").replaceAll("_", "/")), (c) => c.charCodeAt(0));
    return JSON.parse(new TextDecoder().decode(bytes));
  } catch {
    return null;
  }
}
