"""Signs of each cause of a mismatch in the tokens, and its part of the difference.

Causes that change with time are separated first, by contrast: stale weights with the first steps, stale rollouts with
tokens of the newest weights. Effects of a token's position come next, by contrast with later tokens. The rest is
separated by its shape, among tokens without these effects.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rl_metrics.doctor.facts import Facts
from rl_metrics.doctor.limits import (
    CERTAIN,
    EXACT,
    FIT,
    FIT_IF_CUT,
    GROWTH,
    LOST_MASS,
    MIN_TOKENS,
    MOST_OUTLIERS,
    ONE_SIDED,
    ONE_SIDED_IF_SET,
    OUTLIER,
    OUTLIER_SHARE,
    POSITION,
    ROUNDED,
)
from rl_metrics.doctor.token_pairs import LEAST_DOUBT, Bools, Floats, Ints, TokenPairs
from rl_metrics.doctor.token_statistics import (
    Contrast,
    contrast,
    correlation,
    cut_mass,
    find_outliers,
    fit_temperature,
    upward_share,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """The sign of one cause.

    Attributes:
        name: Name of the cause.
        nats: Mean absolute difference over all tokens that it accounts for; 0 if absent.
        texts: Evidence for the cause if it is present, else against it.
    """

    name: str
    nats: float = 0.0
    texts: tuple[str, ...] = ()


@dataclass(slots=True)
class Scene:
    """Tokens, and the differences that remain while causes are separated.

    Attributes:
        pairs: All tokens.
        facts: Facts about the run.
        rest: [N] float64, differences that no cause explains so far, in nats.
        pure: [N] bool, tokens unaffected by causes of time and position.
        has_line: Whether a different temperature was found.
        doubt: [N] float64, doubt of each token.
    """

    pairs: TokenPairs
    facts: Facts
    rest: Floats
    pure: Bools
    has_line: bool
    doubt: Floats

    @classmethod
    def begin(cls, pairs: TokenPairs, facts: Facts) -> "Scene":
        """Start with all differences."""
        pure = np.ones(len(pairs), dtype=bool)
        return cls(pairs, facts, rest=pairs.diff, pure=pure, has_line=False, doubt=pairs.doubt)

    @property
    def is_open(self) -> Bools:
        """[N] bool, tokens that are not nearly certain; differences of the others are mostly rounding."""
        return self.doubt > LEAST_DOUBT

    @property
    def far(self) -> Bools:
        """[N] bool, tokens too far from the prompt for a wrong prompt to affect much."""
        return self.pairs.position >= 3 * first_tokens(self.pairs)

    def contrast(self, first: Bools, second: Bools, *, upwards: bool = False) -> Contrast:
        """Contrast two groups of open tokens by the rest, or by its upward part."""
        rest = np.maximum(self.rest, 0.0) if upwards else self.rest
        is_open = self.is_open
        return contrast(rest, self.doubt, first & is_open, second & is_open)

    def shows(self, found: Contrast, times: float) -> bool:
        """Return whether the second group differs more than the first, beyond chance and float32 rounding."""
        return found.times >= times and found.z >= CERTAIN and found.after > EXACT

    def growth(self, first: Bools, later: Bools) -> tuple[Contrast, float] | None:
        """Return the contrast and its mean over all tokens if later tokens differ more, else None.

        Other causes can hide growth, so it is measured where they are absent. Truncated sampling, whose size changes as
        the policy becomes more certain, has no upward part; a wrong prompt affects only the first tokens.
        """
        everywhere = np.ones(len(self.rest), dtype=bool)
        for place in (everywhere, self.far):
            is_cut = upward_share(self.rest[first & place]) < ONE_SIDED
            upwards = is_cut and self.size(first & place) > EXACT
            found = self.contrast(first & place, later & place)
            if upwards:
                found = self.contrast(*self._ends((first | later) & place), upwards=True)
            if self.shows(found, GROWTH):
                share = float((later & place).sum()) / max(int(place.sum()), 1)
                grown = self.size(later & place) * (1.0 - found.before / found.after)
                if upwards:
                    grown = max(self.size(later & place) - self.size(first & place), 0.0)
                return found, grown * share
        return None

    def _ends(self, chosen: Bools) -> tuple[Bools, Bools]:
        """Return the first and last third of the steps: with truncated sampling, few tokens have an upward part."""
        early, late = np.quantile(self.pairs.step[chosen], (1 / 3, 2 / 3)) if chosen.any() else (0, 0)
        return chosen & (self.pairs.step <= early), chosen & (self.pairs.step > late)

    def size(self, chosen: Bools) -> float:
        """Return the mean absolute rest of the chosen tokens, in nats."""
        return float(np.abs(self.rest[chosen]).mean()) if chosen.any() else 0.0


def first_tokens(pairs: TokenPairs) -> int:
    """Return how many tokens count as a response's first: four, or a quarter of short responses."""
    _, counts = np.unique(pairs.trajectory, return_counts=True)
    return int(np.clip(np.median(counts) // 4, 1, 4)) if len(counts) else 1


def temperature(scene: Scene) -> Sign:
    """Find a different temperature: a line through the differences, present from the first step on."""
    newest = _newest_weights(scene)
    most_explained = 0.0
    for pool in (newest, newest & scene.far):
        first = _earliest(scene, pool)
        ratio, explained, fitted = fit_temperature(scene.pairs, first)
        size = scene.size(first)
        if size <= EXACT:
            return Sign(name="temperature", texts=(f"the first tokens differ by only {size:.2g} nats",))
        is_cut = upward_share(scene.rest[first]) < ONE_SIDED
        most_explained = max(most_explained, explained)
        if explained >= (FIT_IF_CUT if is_cut else FIT):
            break
    else:
        against = f"one temperature explains {_share(most_explained)} of the squared difference of the first tokens"
        return Sign(name="temperature", texts=(against,))
    before = scene.size(scene.pure)
    scene.rest = scene.rest - fitted
    scene.has_line = True
    texts = [
        f"one temperature ratio, engine over learner about {ratio:.3g}, explains {_share(explained)} "
        "of the squared difference of the first tokens"
    ]
    if scene.facts.temperature not in (None, 1.0):
        texts.append(f"rollout.temperature is {scene.facts.temperature:g}, and one side does not apply it")
    return Sign(name="temperature", nats=max(before - scene.size(scene.pure), 0.0), texts=tuple(texts))


def stale_rollouts(scene: Scene) -> Sign:
    """Find stale rollouts: tokens of older versions differ more.

    The sign is named stale_weights if no newer version ever arrived.
    """
    staleness = scene.pairs.staleness
    known = staleness >= 0
    fresh = _newest_weights(scene)
    old = known & ~fresh
    if not known.any() or not old.any():
        what = f"every token is {int(staleness[known].max())} versions old" if known.any() else "no versions are known"
        if known.any() and not staleness[known].any():
            what = "every token was sampled with the learner's weights, according to the engine"
        return Sign(name="stale_rollouts", texts=(what,))
    levels = _by_level(scene, staleness, known)
    grown = scene.growth(fresh, old)
    if grown is None:
        return Sign(name="stale_rollouts", texts=(f"old tokens differ no more than new ones ({levels})",))
    scene.pure = scene.pure & ~old
    stuck = _stuck_version(scene.pairs)
    if stuck is not None:
        text = f"no token was sampled by weights newer than version {stuck}, although the learner advanced"
        return Sign(name="stale_weights", nats=grown[1], texts=(text, f"the difference grows with staleness: {levels}"))
    return Sign(name="stale_rollouts", nats=grown[1], texts=(f"the difference grows with staleness: {levels}",))


def stale_weights(scene: Scene) -> Sign:
    """Find stale weights: the difference grows with the steps among tokens of the same reported staleness."""
    pool = _newest_weights(scene)
    first = _earliest(scene, pool)
    later = pool & ~first & (scene.pairs.step > _last(scene.pairs.step[first]))
    if not later.any():
        return Sign(name="stale_weights", texts=("only one step is recorded",))
    steps = _by_third(scene, pool)
    grown = scene.growth(first, later)
    if grown is None:
        return Sign(name="stale_weights", texts=(f"the difference does not grow with the steps ({steps})",))
    found, nats = grown
    scene.pure = scene.pure & ~later
    begun = (
        f"{found.before:.2g} nats up to step {_last(scene.pairs.step[first])}, {found.after:.2g} later at equal doubt"
    )
    return Sign(name="stale_weights", nats=nats, texts=(f"the difference grows with the steps: {begun} ({steps})",))


def template(scene: Scene) -> Sign:
    """Find a template mismatch: the first tokens of responses differ more than later ones."""
    pairs, pure = scene.pairs, scene.pure
    edge = first_tokens(pairs)
    first, later = pure & (pairs.position < edge), pure & (pairs.position >= edge)
    found = scene.contrast(later, first)
    places = _by_place(scene, pure, edge)
    if not scene.shows(found, POSITION):
        return Sign(name="template", texts=(f"the first tokens differ no more than later ones ({places})",))
    far = pure & scene.far
    if (far & scene.is_open).sum() < MIN_TOKENS:
        far = later
    near = pure & ~far
    usual = scene.contrast(far, near)
    excess = float(np.abs(scene.rest[near]).sum()) / int(pure.sum()) * max(1.0 - usual.before / usual.after, 0.0)
    scene.pure = far
    text = (
        f"the difference is largest at the first tokens and decays: {places}; {found.times:.3g} times, at equal doubt"
    )
    return Sign(name="template", nats=excess, texts=(text,))


def truncation(scene: Scene) -> Sign:
    """Find truncated sampling: the engine's logprobs are higher for nearly every token, by the removed mass."""
    cuts = scene.facts.cuts
    rest = scene.rest[scene.pure]
    kept, lost = cut_mass(scene.pairs.diff[scene.pure], certain=CERTAIN)
    up = upward_share(rest)
    seen = rest[np.abs(rest) > EXACT / 10.0]
    num_up = float((seen > 0.0).mean()) if len(seen) else 0.5
    size = scene.size(scene.pure)
    most_up = ONE_SIDED_IF_SET if cuts else ONE_SIDED
    least_lost = LOST_MASS / 4.0 if scene.has_line else LOST_MASS
    is_one_sided = max(up, num_up) <= most_up and len(seen) >= MIN_TOKENS
    if size <= EXACT or not is_one_sided or lost < least_lost:
        text = f"the learner's logprobs are higher for {_share(num_up)} of the tokens, and the mean ratio is {kept:.4f}"
        return Sign(name="truncation", texts=(text,))
    texts = [
        f"the engine's logprobs are higher for {_share(1.0 - num_up)} of the tokens, which have "
        f"{_share(1.0 - up)} of the difference",
        f"the learner assigns {_share(kept)} of its mass to what the engine can sample; without truncation, all",
    ]
    said = ", ".join(cuts) if cuts else "the recorded settings do not truncate: look at the engine's own defaults"
    return Sign(name="truncation", nats=(1.0 - 2.0 * up) * size, texts=(*texts, said))


def routing(scene: Scene, *, is_cut: bool = False) -> Sign:
    """Find routing differences: a few tokens at any position carry most of the difference.

    With truncated sampling, only the upward part counts.
    """
    if scene.facts.replays:
        return Sign(name="routing", texts=("the learner replays the engine's experts",))
    pure = scene.pure & scene.is_open
    rest = np.maximum(scene.rest[pure], 0.0) if is_cut else scene.rest[pure]
    found = find_outliers(rest, scene.doubt[pure], beyond=OUTLIER, floor=EXACT / 10.0)
    if is_cut and not scene.facts.is_mixture:
        return Sign(
            name="routing", texts=("no mixture of experts is recorded, and truncated sampling explains outliers",)
        )
    share = f"{found.count} tokens of {int(pure.sum())} ({_share(found.tokens)}) carry {_share(found.carried)} of it"
    is_few = found.count >= 3 and found.tokens <= MOST_OUTLIERS
    carried = found.carried * float(np.abs(rest).sum()) / max(int(scene.pure.sum()), 1)
    if not is_few or found.carried < OUTLIER_SHARE or carried <= EXACT / 2.0:
        text = f"the difference is spread over the tokens: {share}, more than {OUTLIER:g} times the median"
        return Sign(name="routing", texts=(text,))
    texts = [f"{share}, {found.times:.3g} times the median on average"]
    if not scene.facts.is_mixture:
        texts.append(
            "the run does not record whether the policy is a mixture of experts; if it is dense, look at kernels"
        )
    return Sign(name="routing", nats=carried * (2.0 if is_cut else 1.0), texts=tuple(texts))


SIGNS: tuple[Callable[[Scene], Sign], ...] = (temperature, stale_rollouts, stale_weights, template)
"""Signs in the order of their separation."""


def remainder(scene: Scene, nats: float, *, is_proven: bool = False) -> Sign:
    """Attribute the rest: to stale weights if a proof failed and rounding is too small, else by its size."""
    pure = scene.pure
    size = scene.size(pure)
    is_large = size > ROUNDED or (scene.facts.is_exact and size > 10.0 * EXACT)
    staleness = scene.pairs.staleness
    if is_proven and (is_large or scene.facts.is_exact):
        text = (
            f"{size:.2g} nats are more than rounding explains ({scene.facts.dtypes}), no other cause shows, "
            "and the proof shows that the engine's weights differ"
        )
        return Sign(name="stale_weights", nats=nats, texts=(text,))
    if is_large and len(staleness) and staleness.min() >= 1:
        text = (
            f"every token was sampled by weights at least {int(staleness.min())} versions old; there is none newer "
            "to compare with"
        )
        return Sign(name="stale_rollouts", nats=nats, texts=(text,))
    up = upward_share(scene.rest[pure])
    doubtful = correlation(np.abs(scene.rest[pure]), scene.doubt[pure])
    shape = f"{_share(up)} of the difference is upward; its correlation with doubt (1 - p) is {doubtful:.2f}"
    if is_large:
        text = f"{size:.2g} nats are more than rounding explains ({scene.facts.dtypes}), and no other cause shows"
        text += f"; present {_since(scene.pairs)}"
        return Sign(name="other_computation", nats=nats, texts=(text, shape))
    return Sign(name="precision", nats=nats, texts=(f"{size:.2g} nats with the {scene.facts.dtypes}", shape))


def _newest_weights(scene: Scene) -> Bools:
    """Return tokens of the lowest staleness, and the next if too few; all tokens if versions are unknown."""
    staleness = scene.pairs.staleness
    known = np.sort(staleness[staleness >= 0])
    if not len(known):
        return np.ones(len(staleness), dtype=bool)
    level = known[min(MIN_TOKENS, len(known)) - 1]
    newest: Bools = (staleness >= 0) & (staleness <= level)
    return newest


def _earliest(scene: Scene, pool: Bools) -> Bools:
    """Return tokens of the earliest steps, at least MIN_TOKENS of them."""
    steps = np.sort(scene.pairs.step[pool & scene.is_open])
    if not len(steps):
        return pool
    last = steps[min(MIN_TOKENS, len(steps)) - 1]
    earliest: Bools = pool & (scene.pairs.step <= last)
    return earliest


def _last(steps: Ints) -> int:
    return int(steps.max()) if len(steps) else 0


def _since(pairs: TokenPairs) -> str:
    first = int(pairs.step.min())
    return "from the first step on" if first <= 1 else f"from step {first} on, the first recorded one"


def _stuck_version(pairs: TokenPairs) -> int | None:
    """Return the version of all tokens of the later half, if the learner made at least three in that time."""
    steps = np.unique(pairs.step)
    late = (pairs.step >= steps[len(steps) // 2]) & (pairs.version >= 0)
    versions, made = np.unique(pairs.version[late]), np.unique(pairs.policy_version[late])
    return int(versions[0]) if len(versions) == 1 and len(made) >= 3 else None


def _by_level(scene: Scene, staleness: Ints, known: Bools) -> str:
    levels = [int(level) for level in np.unique(staleness[known])[:4]]
    return "; ".join(f"{scene.size(known & (staleness == level)):.2g} nats at {level} versions" for level in levels)


def _by_third(scene: Scene, pool: Bools) -> str:
    steps = np.unique(scene.pairs.step[pool])
    parts = [part for part in np.array_split(steps, 3) if len(part)]
    sizes = [
        (part, scene.size(pool & (scene.pairs.step >= part[0]) & (scene.pairs.step <= part[-1]))) for part in parts
    ]
    return "; ".join(f"{size:.2g} nats in steps {part[0]} to {part[-1]}" for part, size in sizes)


def _by_place(scene: Scene, pure: Bools, edge: int) -> str:
    position = scene.pairs.position
    groups = [(str(place + 1), pure & (position == place)) for place in range(edge)]
    groups.append((f"{edge + 1} and later", pure & (position >= edge)))
    return "; ".join(f"{scene.size(group):.2g} nats at token {name}" for name, group in groups)


def _share(share: float) -> str:
    return f"{100.0 * share:.3g} %"
