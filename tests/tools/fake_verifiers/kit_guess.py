"""Several turns: the environment answers each guess, and judges after the last."""

import verifiers.v1 as vf


class Data(vf.TaskData):
    answer: int


class Task(vf.Task[Data]):
    @vf.reward(weight=2.0)
    async def found(self, trace: vf.Trace, runtime: vf.Runtime) -> float:
        await runtime.write("reply.txt", trace.last_reply.encode())
        return float(await runtime.read("reply.txt") == str(self.data.answer).encode())


class GuessEnv(vf.SingleAgentEnv):
    async def run(self, task: Task, agents: vf.Agents) -> None:
        async with agents.agent.interaction(task) as talk:
            segment = await talk.turn()
            while not segment.terminated and segment.last_reply != str(task.data.answer):
                segment = await talk.turn(f"Not {segment.last_reply}.")

    async def finalize(self, task: Task, episode: vf.Episode) -> None:
        (trace,) = episode.traces
        trace.record_reward("quick", 1 / trace.num_turns, 0.1)


class Guesses(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self) -> list[Task]:
        data = [Data(prompt="Guess below 10.", system_prompt="Short.", answer=answer) for answer in (4, 7)]
        return [Task(one, self.config.task) for one in data]


__all__ = ["GuessEnv", "Guesses"]
