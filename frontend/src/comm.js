// The comm of a notebook's widget. Several views of one widget share it: each takes the replies to its own questions only.

const PATIENCE = 4000; // milliseconds after which a reader is told why nothing comes

/** {send(message), close()} over a widget's model; `onReply`, `onSilence(text)` and `onRevision(number)` are called. */
export function commTransport(model, { onReply, onSilence, onRevision }) {
  const view = Math.random().toString(36).slice(2);
  const silence = setTimeout(() => onSilence("The kernel has not answered yet: it is busy, or it has ended; then run the cell again."), PATIENCE);
  const received = (content) => {
    if (content?.view !== view) return;
    clearTimeout(silence);
    onReply(content.reply);
  };
  const revised = () => onRevision(model.get("revision"));
  model.on("msg:custom", received);
  model.on("change:revision", revised);
  return {
    send: (message) => model.send({ view, message }),
    close() {
      clearTimeout(silence);
      model.off("msg:custom", received);
      model.off("change:revision", revised);
    },
  };
}
