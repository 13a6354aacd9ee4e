"""`survey`: scores of several models; one that cannot be scored does not lose the others."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from attnflow._core.errors import AttnflowError
from attnflow._core.progress import Progress
from attnflow._core.results import Result
from attnflow.geometry.score import Attention, score
from attnflow.geometry.scores import Mode, check_reading
from attnflow.geometry.table import GeometryScores


@dataclass(frozen=True)
class Survey(Result):
    """Scores of several models.

    Attributes:
        models: those that could be scored, under the names that they were given by.
        unscored: why others could not, by name.
    """

    models: tuple[GeometryScores, ...]
    unscored: dict[str, str]

    @property
    def ok(self) -> bool:
        """Whether every model was scored."""
        return not self.unscored

    def rows(self) -> list[Mapping[str, object]]:
        """The rows of all models."""
        return [row for model in self.models for row in model.rows()]


def survey(
    sources: Sequence[str],
    gamma: float = 2.0,
    mode: Mode = "excess",
    per_head: bool = True,
    attention: Attention = "self",
    *,
    config: Mapping[str, object] | None = None,
    progress: Progress | None = None,
) -> Survey:
    """Score each model once, in the order of their names; the arguments are those of `score`.

    Args:
        progress: called before each model, and after each layer, with how many are done, how many there are, and
            what is next.

    Raises:
        ValueError: gamma, mode or attention are of no reading, whatever the model.
    """
    check_reading(gamma, mode)
    models: list[GeometryScores] = []
    unscored: dict[str, str] = {}
    distinct = list(dict.fromkeys(sources))
    for number, name in enumerate(distinct, 1):
        which = f"{name} (model {number} of {len(distinct)})" if len(distinct) > 1 else name

        def tell(done: int, total: int, layer: str, which: str = which) -> None:
            if progress is not None:
                progress(done, total, f"{which}: {layer}")

        tell(0, 1, "opening")
        try:
            scores = score(name, gamma, mode, per_head, attention, config=config, progress=tell)
        except (AttnflowError, OSError, ValueError, MemoryError) as error:
            unscored[name] = str(error) or type(error).__name__
        except Exception as error:  # a defect of ours must not lose the models before and after it
            if os.environ.get("ATTNFLOW_TRACEBACK"):
                raise
            unscored[name] = f"unexpected {type(error).__name__}: {error}; ATTNFLOW_TRACEBACK=1 shows where"
        else:
            models.append(replace(scores, model=name))
    return Survey(tuple(models), unscored)
