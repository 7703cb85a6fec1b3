"""PPO: several environments, rollouts, epochs of minibatches, running statistics of observations and rewards."""

import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical

from mizzen import Checkpointer


class RunningMeanStd:
    def __init__(self, shape):
        self.mean, self.var, self.count = np.zeros(shape), np.ones(shape), 1e-4

    def update(self, x):
        delta, n = x.mean(0) - self.mean, len(x)
        total = self.count + n
        self.mean = self.mean + delta * n / total
        self.var = (self.var * self.count + x.var(0) * n + delta**2 * self.count * n / total) / total
        self.count = total


class VecEnv:
    def __init__(self, n, seed):
        self.rngs = [np.random.default_rng(seed + i) for i in range(n)]
        self.obs = np.stack([r.normal(size=3) for r in self.rngs])
        self.t = np.zeros(n, int)

    def step(self, actions):
        noise = np.stack([r.normal(size=3) for r in self.rngs])
        self.obs = 0.9 * self.obs + 0.1 * (actions[:, None] - 0.5) + 0.1 * noise
        reward = -np.abs(self.obs).sum(1)
        self.t += 1
        done = self.t >= 12
        for i in np.nonzero(done)[0]:
            self.obs[i], self.t[i] = self.rngs[i].normal(size=3), 0
        return self.obs.copy(), reward, done


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 2))
        self.critic = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))

    def act(self, x, action=None):
        dist = Categorical(logits=self.actor(x))
        action = dist.sample() if action is None else action
        return action, dist.log_prob(action), dist.entropy(), self.critic(x).squeeze(-1)


np.random.seed(1)
torch.manual_seed(1)
envs, agent, stats = VecEnv(4, 10), Agent(), RunningMeanStd(3)
optimizer = torch.optim.Adam(agent.parameters(), lr=3e-3, eps=1e-5)
ckpt = Checkpointer()
ckpt.track(
    agent=agent,
    optimizer=optimizer,
    stats=stats.__dict__,
    envs=(
        lambda: {"obs": envs.obs, "t": envs.t, "rngs": [r.bit_generator.state for r in envs.rngs]},
        lambda s: (
            setattr(envs, "obs", s["obs"].copy()),
            setattr(envs, "t", s["t"].copy()),
            [setattr(r.bit_generator, "state", one) for r, one in zip(envs.rngs, s["rngs"])],
        ),
    ),
)
start = ckpt.restore()
for update in range(start + 1, 13):
    optimizer.param_groups[0]["lr"] = 3e-3 * (1 - (update - 1) / 12)
    obs, acts, logps, rews, dones, vals = [], [], [], [], [], []
    for _ in range(8):
        stats.update(envs.obs)
        o = torch.tensor((envs.obs - stats.mean) / np.sqrt(stats.var + 1e-8), dtype=torch.float32)
        with torch.no_grad():
            a, lp, _, v = agent.act(o)
        _, r, d = envs.step(a.numpy())
        for store, item in zip((obs, acts, logps, vals), (o, a, lp, v)):
            store.append(item)
        rews.append(torch.tensor(r, dtype=torch.float32))
        dones.append(torch.tensor(d, dtype=torch.float32))
    adv, last, nextv = torch.zeros(8, 4), 0, vals[-1]
    for t in reversed(range(8)):
        delta = rews[t] + 0.99 * nextv * (1 - dones[t]) - vals[t]
        adv[t] = last = delta + 0.99 * 0.95 * (1 - dones[t]) * last
        nextv = vals[t]
    obs, acts, logps, vals = torch.cat(obs), torch.cat(acts), torch.cat(logps), torch.cat(vals)
    adv = adv.flatten()
    returns, inds = adv + vals, np.arange(32)
    for _ in range(2):
        np.random.shuffle(inds)
        for i in range(0, 32, 8):
            mb = torch.from_numpy(inds[i : i + 8])
            _, lp, ent, v = agent.act(obs[mb], acts[mb])
            ratio = (lp - logps[mb]).exp()
            a = (adv[mb] - adv[mb].mean()) / (adv[mb].std() + 1e-8)
            loss = torch.max(-a * ratio, -a * ratio.clamp(0.8, 1.2)).mean() - 0.01 * ent.mean()
            loss = loss + 0.5 * ((v - returns[mb]) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()
    ckpt.step(update)
torch.save([agent.state_dict(), optimizer.state_dict(), stats.mean, stats.var, envs.obs], "model.pt")
