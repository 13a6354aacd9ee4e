"""The process of a model as a page knows it, with a fault in the model: an MLP that reads the token after its own."""

import sys

from attnflow.report.live import model
from attnflow.studio import model_worker


def leaky(*arguments, **options):
    loaded = load(*arguments, **options)
    loaded.model.model.layers[1].mlp.register_forward_hook(lambda _, __, out: out + out.roll(-1, dims=1))
    return loaded


if __name__ == "__main__":
    load, model.load_model = model.load_model, leaky
    model_worker.main(int(sys.argv[1]))
