"""Settings of roles: where they arrive, and which are refused."""

from __future__ import annotations

import pytest

from agent_r1.backends.verl.settings import check_settings
from agent_r1.build.learner import build_shaper, learner_settings
from agent_r1.build.plan import build_algorithm, build_plan
from agent_r1.config import RunConfig, load_config
from agent_r1.errors import ConfigError


def roles(*overrides: str) -> RunConfig:
    return load_config("drafts_critic", list(overrides))


def test_the_learner_knows_the_temperature_and_the_limit_of_each_role() -> None:
    config = roles("rollout.roles={critic: {temperature: 1.5}, drafter: {max_response_tokens: 7}}")
    algorithm = build_algorithm(config)
    assert learner_settings(config, algorithm)["temperature"] == {"": 1.0, "critic": 1.5}
    shaper = build_shaper(config, algorithm)
    assert (shaper.by_role, shaper.overlong_limit) == (True, {"": 12, "drafter": 7})
    plain = load_config("quickstart")
    assert learner_settings(plain, build_algorithm(plain))["temperature"] == 1.0
    assert build_shaper(plain, build_algorithm(plain)).overlong_limit == 24


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["rollout.roles={critik: {temperature: 1.5}}"], r"roles \('drafter', 'critic'\).*Did you mean 'critic'"),
        (["rollout.roles={critic: {max_response_tokens: 192}}"], "must be smaller than rollout.max_context_tokens"),
        (["rollout.roles={critic: {max_steps: 2}}"], "max_steps"),
        (["algorithm.name=remax", "rollout.group_size=1"], "leave by_role out, or use rloo"),
        (["algorithm.name=ppo", "algorithm.settings.bootstrap_truncated=true"], "bootstrap_truncated=false"),
    ],
)
def test_settings_of_roles_without_effect_or_sense_are_refused(overrides: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        build_plan(roles(*overrides))


def test_a_flow_without_roles_refuses_credit_by_role() -> None:
    with pytest.raises(ConfigError, match=r"rewards\.by_role has no effect with the flow AgentEnvLoop"):
        build_plan(load_config("quickstart", ["rewards.by_role=true"]))


def test_verl_refuses_temperatures_of_roles_and_takes_their_limits() -> None:
    limits = roles("backend=verl", "rollout.roles={critic: {temperature: null, max_response_tokens: 4}}")
    check_settings(limits, build_algorithm(limits))
    warm = roles("backend=verl")
    with pytest.raises(ConfigError, match=r"rollout\.roles with a temperature"):
        check_settings(warm, build_algorithm(warm))
