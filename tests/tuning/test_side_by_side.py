"""Many plans in one pass give what evaluation finds for each."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lowkv.calibration.routes import load_decoder
from lowkv.evaluation.quality import score
from lowkv.evaluation.subjects import Subject
from lowkv.models.checkpoint import open_checkpoint
from lowkv.recipe import load_recipe
from lowkv.tuning.plans import space_of
from lowkv.tuning.side_by_side import compare


def test_scores_are_those_of_evaluation(recipe: Path, checkpoint: Path) -> None:
    opened, loaded = open_checkpoint(checkpoint), load_recipe(recipe)
    decoder = load_decoder(opened, loaded)
    space = space_of(loaded, opened.config, ("kivi4", "kivi2"))
    plans = {"alone": space.alone(2, "kivi2"), "all": space.uniform("kivi4"), "kivi2": space.uniform("kivi2")}
    ids = np.random.default_rng(3).integers(0, opened.config.vocab, (2, 131))
    seen: list[int] = []
    found = compare(decoder, space.baseline, list(plans.values()), ids, seen.append)
    subjects = [Subject(name, decoder, plan) for name, plan in ({"base": space.baseline} | plans).items()]
    expected = score(subjects, "base", ids)
    assert sum(seen) == ids.size * len(subjects)
    for (kl, nll, agree), name in zip(found, plans, strict=True):
        one = expected[name]
        assert one.kl.max() > 1e-5  # the cache was read as stored
        # Matrices of other heights round otherwise in the last bit; a code on the border may then fall otherwise.
        for got, wanted in ((kl, one.kl), (nll, one.nll - expected["base"].nll)):
            assert np.quantile(np.abs(got - wanted), 0.9) < 1e-4
            np.testing.assert_allclose(got.mean(), wanted.mean(), rtol=0.05, atol=1e-5)
        assert np.mean(agree != one.agree) < 0.02
