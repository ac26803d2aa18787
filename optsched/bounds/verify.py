"""`verify`: what a certificate proves of a problem."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from optsched.bounds.certificate import verify_certificate
from optsched.bounds.checker.check import digest
from optsched.bounds.checker.seconds import IN_TIME
from optsched.bounds.pools import verify_pools
from optsched.files.read_write import read_json
from optsched.problem.errors import UsageError, ViolationError
from optsched.problem.instance import Instance
from optsched.workloads.problem import Problem, as_problem


def verify(
    problem: Problem | Instance | str | Path, certificate: Mapping[str, Any] | str | Path
) -> int | float:
    """Return the value that a certificate proves of a problem, once it is checked.

    No schedule has a better value of the certificate's objective. The check runs no solver.

    Parameters
    ----------
    problem : Problem
        The instance and its machines, whatever its objective. Or an instance in rounds, its file or
        its name.
    certificate : mapping, str or path
        A certificate, or its file.

    Raises
    ------
    ViolationError
        If the certificate proves nothing, or something of another instance or of other machines.
    UsageError
        If it is about one machine and the problem has several, or the other way round.

    Examples
    --------
    >>> from optsched import bound, verify
    >>> verify("tiny", bound("tiny", time_limit_s=1).certificate)
    33
    """
    problem = as_problem(problem)
    if isinstance(certificate, Mapping):
        data = dict(certificate)
    else:
        data = read_json(certificate, expect="certificate")

    # A certificate about pools is for fleets with a link, and one without for one machine.
    pools = problem.pools
    if ("pools" in data) != (pools is not None) or (pools is None and problem.workers > 1):
        found = "about pools" if "pools" in data else "about one machine"
        raise UsageError(
            f"found a certificate {found}, and a fleet of {problem.fleet.words} machines "
            f"with{'' if pools else 'out'} a link; expected a certificate about the fleet"
        )

    if pools is not None:
        return verify_pools(problem.instance, data, pools)

    return verify_certificate(problem.instance, data, problem.cost_model)


def refusal(problem: Problem | Instance | str | Path, certificate: Mapping[str, Any]) -> str:
    """Return why a valid certificate does not prove one unit more: where its check then fails.

    The unit is a round or a tick, and of requests in time it is one request less.

    Parameters
    ----------
    problem : Problem
        As of `verify`.
    certificate : mapping

    Raises
    ------
    ViolationError
        If it proves that, too, so that its value is not all that it proves.
    """
    value = certificate["value"] + (-1 if certificate["objective"] == IN_TIME else 1)
    tree, reason = certificate["tree"], ""
    trees = [tree]
    # Each busy period of a ramp proves at most a value of its own, so one after another is raised.
    if tree.get("relaxation") == "ramp":
        trees = []
        for k, period in enumerate(tree["periods"]):
            raised = [*tree["periods"]]
            raised[k] = {**period, "value": period["value"] + 1}
            trees.append({**tree, "periods": raised})

    # All of them have to fail.
    for tree in trees:
        forged = {**certificate, "value": value, "tree": tree}
        try:
            verify(problem, {**forged, "sha256": digest(forged)})
        except ViolationError as error:
            if error.rule != "certificate":
                raise

            reason = str(error)
        else:
            raise ViolationError(
                f"certificate: value: found {certificate['value']}, and {value} is proved, too; "
                "expected the best one",
                rule="certificate_tight",
            )

    return reason
