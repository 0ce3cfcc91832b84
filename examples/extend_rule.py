"""A rule of your own: a finding if the reward of an agent has not improved for a long time.

    python examples/extend_rule.py

A rule is a function of a window of numbers, and passes `sonde.testing.RuleTests`. It runs wherever it is imported; a
package names its module as an entry point of the group `sonde.rules`, and every command then runs it too.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

import sonde
from sonde.diagnose.rule import Evidence, Found, Window, rule

PATIENCE = 100
"""Steps without a better reward."""


@rule(severity="warning")
def reward_plateau(window: Window) -> Iterator[Found]:
    """The reward has stopped improving."""
    steps, rewards = window.get("reward")
    if not np.isfinite(rewards).any():
        return
    best = int(np.nanargmax(rewards))
    since = int(steps[-1] - steps[best])
    if since < PATIENCE or np.ptp(rewards[np.isfinite(rewards)]) == 0:
        return
    yield Found(
        f"The reward has not exceeded {rewards[best]:.3g} for {since} steps.",
        step=int(steps[best]),
        confidence=0.7,
        remedy="Explore more (raise the entropy bonus), or lower the learning rate.",
        evidence=(Evidence("reward", float(rewards[-1]), f"above {rewards[best]:.3g}", step=int(steps[-1])),),
    )


def main() -> None:
    random = np.random.default_rng(0)
    with sonde.init(project="extend", live_rules=False) as session:
        for step in range(300):
            session.log({"reward": min(step, 100) / 100 + 0.001 * random.random() - 0.002 * (step > 100)})
            session.step()
    for finding in sonde.open("latest").findings():
        print(f"{finding.rule}: {finding.message} {finding.remedy}")


if __name__ == "__main__":
    main()
