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
    socket.send(JSON.stringify({ token, guest }));
    onOpen();
  });
  socket.addEventListener("message", (event) => onReply(JSON.parse(event.data)));
  socket.addEventListener("close", (event) => {
    const ended = opened ? "The studio has ended. Start it again with `attnflow studio`." : "No studio answers at this address.";
    onClosed(REASONS[event.code] ?? ended);
  });
  return { send: (message) => socket.readyState === WebSocket.OPEN && socket.send(JSON.stringify(message)) };
}

/** What the fragment of an address holds: the token, and the design that a link brings. */
export function fragment() {
  const values = new URLSearchParams(location.hash.slice(1));
  return { token: values.get("token") ?? "", design: decoded(values.get("design")) };
}

/** Put a design into the address, so that a reload or a bookmark brings it back. */
export function remember(token, design) {
  const values = new URLSearchParams({ token });
  if (design) values.set("design", encoded(design));
  history.replaceState(null, "", `#${values}`);
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
