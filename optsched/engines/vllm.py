"""A policy of optsched inside vLLM: vLLM's KV manager and executor, our order and admission.

vLLM takes the class by its name, and the policy from its configuration::

    LLM(
        model="...",
        scheduler_cls="optsched.engines.vllm.PolicyScheduler",
        additional_config={"optsched": {"policy": "mc-sf", "cost_model": "model.toml"}},
        enable_prefix_caching=False,
    )

A request says in ``SamplingParams(extra_args={"predicted_output_tokens": 120})`` how long its
output is thought to be. Without that it is thought to be ``max_tokens`` long. Rules that split no
prefill have one split that no step has room for. Importing this module does not need
vLLM. It was written for the versions in `TESTED`.
"""

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from optsched.costs.cost import CostModel, UnitCost
from optsched.costs.load import load_cost_model
from optsched.engines.sending import PREDICTED
from optsched.policies import make_policy
from optsched.policies.base import Batch, Job, Rules, Scheduler, View
from optsched.policies.engine.stepwise import Stepwise
from optsched.problem.errors import PolicyError, UsageError
from optsched.problem.instance import Instance, Limits
from optsched.problem.notes import warn
from optsched.problem.streams import stream

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler as _Base
else:
    _Base = object  # vLLM's class comes in when it is asked for

TESTED = ("0.32.0",)
"""The versions of vLLM that this module was tested with."""


@dataclass(eq=False)
class Desk:
    """What a policy that is asked batch by batch is told of a server's requests.

    Requests are numbered as they come. Nothing is known of their outputs but predictions.
    `policy`: rules, or an object with ``batch(view)``.
    `kv_capacity`, `kv_block_tokens`: KV tokens of the server, and of a block.
    `limits`, `chunked`: max tokens and requests of a step, and whether prefills may be split.
    """

    policy: Scheduler
    cost: CostModel
    kv_capacity: int
    kv_block_tokens: int
    limits: Limits
    chunked: bool = True
    seed: int = 0
    arrival: list[float] = field(default_factory=list)
    prompt: list[int] = field(default_factory=list)
    predicted: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not isinstance(self.policy, Rules) and not callable(getattr(self.policy, "batch", None)):
            found = f"policy: found {type(self.policy).__name__}, which runs as a whole"
            raise UsageError(f"{found}; expected Rules or an object with batch(view)")

        if isinstance(self.policy, Rules) and self.policy.order == "service":
            raise UsageError("policy: found one that serves clients; vLLM's requests name none")

        # Only whole blocks can be used.
        self.kv_capacity -= self.kv_capacity % self.kv_block_tokens
        self.generator = stream(self.seed, "policy", 0)
        self.asked: Any = self.policy
        self.n_told = 0  # requests that rules have been told of

    def add(self, arrival: float, prompt: int, predicted: float) -> int:
        """Take in a request, and return its number.

        Its prediction is cut to what fits into the KV capacity alone: all tokens but the last are
        cached.
        """
        self.arrival.append(arrival)
        self.prompt.append(prompt)
        self.predicted.append(max(1, min(round(predicted), self.kv_capacity - prompt + 1)))
        return len(self.arrival) - 1

    def ask(
        self,
        now: float,
        waiting: list[int],
        running: list[int],
        generated: NDArray[np.int64],
        cached: NDArray[np.int64],
        decoding: NDArray[np.bool_],
    ) -> Batch:
        """Ask the policy for the next batch.

        ``waiting`` and ``running`` are numbers of requests in the order of the policy's queues. The
        arrays are by number: tokens produced, tokens cached, and who decodes.
        """
        arrival, prompt = np.array(self.arrival), np.array(self.prompt)
        predicted = np.array(self.predicted)
        # Rules are told of new requests before they are asked: at first by an engine that runs them
        # step by step, which then learns of more. Their outputs are taken to be as predicted.
        if isinstance(self.policy, Rules) and self.n_told < len(prompt):
            # "cached": the KV of a request's newest token does not count (`kv_accounting`).
            requests = Instance(
                *(arrival, prompt, predicted, self.kv_capacity, "second", "cached", self.limits),
                kv_block_tokens=self.kv_block_tokens,
                chunked_prefill=None if self.chunked else False,
            )
            if self.n_told:
                self.asked.learn(Job(requests, requests, self.cost))
            else:
                self.asked = Stepwise(self.policy, Job(requests, requests, self.cost))

            self.n_told = len(prompt)

        max_step = self.limits.max_batch_tokens  # of a step of vLLM, in tokens
        if max_step is not None and isinstance(self.asked, Stepwise) and not self.asked.chunked:
            # No step has room for all of a longer prefill: it goes in parts, beside all decodes.
            # The policy is told that all but the next part is cached.
            size, chunk = prompt + generated, max(1, max_step - int(decoding[running].sum()))
            too_long = size - cached > np.where(cached > 0, chunk, max_step)
            cached = np.where(too_long, size - chunk, cached)

        view = View(
            *(now, waiting, running, arrival, prompt, predicted),
            remaining=np.maximum(1.0, predicted - generated),
            generated=generated,
            cached=cached,
            decoding=decoding,
            kv_capacity=self.kv_capacity,
            kv_offset=0,
            limits=self.limits,
            hybrid=True,
            chunked=self.chunked,
            evict_mode="recompute",
            generator=self.generator,
            cost=self.cost,
            kv_block_tokens=self.kv_block_tokens,
        )
        answer = self.asked.batch(view)
        if not isinstance(answer, Batch):
            raise PolicyError(f"policy: found {answer!r:.80}; expected a Batch")
        if waiting and not (running or answer.tokens):
            i = waiting[0]
            what_is_found = f"found an empty batch while request {i} of {prompt[i]} tokens waits"
            warn(f"policy: {what_is_found}, and nothing runs", stacklevel=2)

        return answer


def _unsupported_option(config: Any) -> str | None:
    """Return what a configuration of vLLM asks for that the scheduler cannot do, or None."""
    unsupported = {
        "enable_prefix_caching": config.cache_config.enable_prefix_caching,
        "async_scheduling": config.scheduler_config.async_scheduling,
        "pipeline_parallel_size > 1": config.parallel_config.pipeline_parallel_size > 1,
        "speculative_config": config.speculative_config,
        "lora_config": config.lora_config,
        "kv_transfer_config": config.kv_transfer_config,
        "ec_transfer_config": config.ec_transfer_config,
        "an encoder": config.model_config.is_encoder_decoder,
        "multimodal inputs": config.model_config.is_multimodal_model,
        "a runner other than generate": config.model_config.runner_type != "generate",
    }
    return next((name for name, is_asked_for in unsupported.items() if is_asked_for), None)


class _PolicyMixin(_Base):
    """What gives vLLM's scheduler the order, the admission and the preemptions of a policy."""

    def __init__(self, vllm_config: Any, *args: Any, **options: Any) -> None:
        unsupported = _unsupported_option(vllm_config)
        if unsupported is not None:
            what_is_found = f"optsched.engines.vllm: found {unsupported}"
            raise UsageError(f"{what_is_found}; expected a configuration without")

        super().__init__(vllm_config, *args, **options)
        config = vllm_config.additional_config.get("optsched", {})
        if not isinstance(config, dict) or "policy" not in config:
            what_is_found = f"additional_config.optsched: found {config!r:.80}"
            raise UsageError(f'{what_is_found}; expected a policy, as in {{"policy": "fcfs"}}')

        settings, model = self.scheduler_config, config.get("cost_model")
        self._desk = Desk(
            make_policy(config["policy"])[0],
            UnitCost() if model is None else load_cost_model(model),
            (self.kv_cache_config.num_blocks - 1) * self.block_size,  # one stays empty
            self.block_size,
            Limits(self.max_num_scheduled_tokens, None, self.max_num_running_reqs),
            chunked=settings.enable_chunked_prefill,
            seed=int(config.get("seed", 0)),
        )
        # A dry run, which compiles the rules before a request waits for it.
        if isinstance(self._desk.policy, Rules):
            dry_desk = replace(self._desk, arrival=[0.0], prompt=[1], predicted=[1])
            # One request waits and none runs; nothing is produced or cached, and nobody decodes.
            nothing = np.zeros(1, np.int64)
            dry_desk.ask(0.0, [0], [], nothing, nothing, nothing > 0)

        self._number: dict[str, int] = {}  # of each request, by vLLM's id
        self._known: list[Any] = []  # vLLM's requests by number
        self._wait_order: list[int] = []  # by number: who began to wait later has a higher one
        self._n_waits = 0

    def add_request(self, request: Any) -> None:
        """Take in a request with its prediction, or its max output without one.

        Its number is its place in all lists here.
        """
        extra = request.sampling_params.extra_args or {}
        predicted = float(extra.get(PREDICTED, request.max_tokens))
        number = self._desk.add(request.arrival_time, request.num_prompt_tokens, predicted)
        self._number[request.request_id] = number
        self._known.append(request)
        self._wait_order.append(0)
        self._begin_waiting(number)
        super().add_request(request)

    def _begin_waiting(self, number: int) -> None:
        """Put a request that has come, or was evicted, at the end of those that wait."""
        self._n_waits += 1
        self._wait_order[number] = self._n_waits

    def _ask(self) -> Batch:
        """Ask the policy about the requests that wait and run.

        Those that wait are in the order in which they began to, those that run in that of arrivals.
        Arrays are by number, and 0 for who has ended.
        """
        from vllm.v1.request import RequestStatus

        number, known = self._number, self._known
        queued = (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        running = [number[r.request_id] for r in self.running]
        waiting = [number[r.request_id] for r in self.waiting if r.status in queued]
        if not running and not waiting:
            return Batch()

        n, present = len(known), [*running, *waiting]
        generated, cached = np.zeros(n, np.int64), np.zeros(n, np.int64)
        decoding = np.zeros(n, np.bool_)
        generated[present] = [known[i].num_output_tokens for i in present]
        cached[present] = [known[i].num_computed_tokens for i in present]
        decoding[running] = [not known[i].is_prefill_chunk for i in running]

        waiting.sort(key=self._wait_order.__getitem__)
        running.sort(key=lambda i: (self._desk.arrival[i], i))
        return self._desk.ask(time.time(), waiting, running, generated, cached, decoding)

    def schedule(self, throttle_prefills: bool = False) -> Any:
        """Return what the next step processes.

        It takes the place of vLLM's own method: what the policy asks for is cut to what is missing
        and to the limits of a step, and left out where the KV manager has no room.
        """
        from vllm.v1.request import RequestStatus

        self.current_step += 1
        self.kv_cache_manager.new_step_starts()
        answer = self._ask()

        for i in answer.evict:
            request = self._known[i]
            self.running.remove(request)
            self._preempt_request(request, time.monotonic())
            self._begin_waiting(i)

        # vLLM's executor is told apart new requests, evicted ones that return, and running ones.
        fresh, resumed, running = list[Any](), list[Any](), list[Any]()
        blocks: dict[str, Any] = {}
        tokens: dict[str, int] = {}
        tokens_left = self.max_num_scheduled_tokens

        for i, asked in answer.tokens.items():
            request = self._known[i]
            is_waiting = request.status != RequestStatus.RUNNING  # new, or evicted before
            missing = request.num_tokens - request.num_computed_tokens
            scheduled = min(int(asked), missing, tokens_left)
            if scheduled < 1 or (is_waiting and len(self.running) >= self.max_num_running_reqs):
                continue

            new_blocks = self.kv_cache_manager.allocate_slots(request, scheduled)
            if new_blocks is None:
                continue  # the policy asks for more KV than there is
            if is_waiting:
                is_new = request.status == RequestStatus.WAITING
                (fresh if is_new else resumed).append(request)
                self.waiting.remove_request(request)
                self.running.append(request)
                request.status = RequestStatus.RUNNING
            else:
                running.append(request)

            # The executor keeps the blocks of running requests, and is told of new ones only.
            blocks[request.request_id] = (
                self.kv_cache_manager.get_blocks(request.request_id) if is_waiting else new_blocks
            )
            tokens[request.request_id] = scheduled
            tokens_left -= scheduled

        return self._output(fresh, resumed, running, blocks, tokens)

    def _output(self, fresh: Any, resumed: Any, running: Any, blocks: Any, tokens: Any) -> Any:
        """Return the step as vLLM's executor expects it.

        `fresh`, `resumed`, `running`: its requests, see `schedule`. `blocks`, `tokens`: by their
        ids, the KV blocks to tell of and the tokens to process.
        """
        from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput

        if self.use_v2_model_runner:
            # This runner is told of evicted requests that return as of new ones, with all tokens.
            fresh, resumed = [*fresh, *resumed], []

        new_requests, mrope = [], self.model_uses_mrope
        for r in fresh:
            token_ids = (r._all_token_ids,) if self.use_v2_model_runner else ()
            arguments = (r, blocks[r.request_id].get_block_ids(), *token_ids)
            new_requests.append(NewRequestData.from_request(*arguments, uses_mrope=mrope))

        cached = self._make_cached_request_data(running, resumed, tokens, {}, blocks)
        if not self.use_v2_model_runner:
            self.prev_step_scheduled_req_ids.clear()
            self.prev_step_scheduled_req_ids.update(tokens)

        output = SchedulerOutput(
            scheduled_new_reqs=new_requests,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=tokens,
            total_num_scheduled_tokens=sum(tokens.values()),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            scheduled_encoder_input_stats=None,
            preempted_req_ids=self.reset_preempted_req_ids,
            finished_req_ids=self.finished_req_ids,
            free_encoder_mm_hashes=[],
            new_block_ids_to_zero=self._get_new_block_ids_to_zero(),
            num_spec_tokens_to_schedule=0,
            ec_manager_metadata=self.encoder_cache_manager.get_manager_metadata(),
        )
        self._update_after_schedule(output)
        return output


def _scheduler_class() -> type:
    """Return the class, which is made only here since its base is vLLM's own."""
    import vllm
    from vllm.v1.core.sched.scheduler import Scheduler as Base

    # What follows a + says how it was built.
    version = str(vllm.__version__).partition("+")[0]
    if version not in TESTED:
        words = f"found vLLM {version}; tested with {', '.join(TESTED)}"
        warn(f"optsched.engines.vllm: {words}", stacklevel=3)

    return type("PolicyScheduler", (_PolicyMixin, Base), {"__module__": __name__})


def __getattr__(name: str) -> Any:
    """Make the class when vLLM, or a user, asks for it."""
    if name != "PolicyScheduler":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    globals()[name] = _scheduler_class()
    return globals()[name]
