"""Deep Q-learning with an environment, a replay buffer and an annealed policy of the script's own classes."""

import copy
import math
import random
from collections import deque

import torch
from torch import nn

from mizzen import Checkpointer


class Pendulum:
    """An environment with noise from a generator of its own."""

    def __init__(self, seed):
        self.noise = random.Random(seed)
        self.angle = self.speed = 0.0
        self.time = 0

    def reset(self):
        self.angle, self.speed, self.time = self.noise.uniform(-1, 1), 0.0, 0
        return self.observe()

    def observe(self):
        return torch.tensor([math.cos(self.angle), math.sin(self.angle), self.speed])

    def step(self, action):
        self.speed += 0.1 * math.sin(self.angle) + 0.2 * (action - 1) + self.noise.gauss(0, 0.01)
        self.angle += 0.1 * self.speed
        self.time += 1
        return self.observe(), -abs(self.angle), self.time >= 15


class Replay:
    """The newest transitions."""

    def __init__(self, size):
        self.transitions = deque(maxlen=size)

    def push(self, *transition):
        self.transitions.append(transition)

    def sample(self, count):
        chosen = random.sample(self.transitions, count)
        states, actions, rewards, following = zip(*chosen, strict=True)
        return torch.stack(states), torch.tensor(actions), torch.tensor(rewards), torch.stack(following)

    def __len__(self):
        return len(self.transitions)


class Greedy:
    """Chooses actions; mostly random ones at the beginning."""

    def __init__(self):
        self.epsilon = 1.0
        self.explored = 0

    def __call__(self, net, state):
        self.epsilon = max(0.05, self.epsilon * 0.97)
        if random.random() < self.epsilon:
            self.explored += 1
            return random.randrange(3)
        with torch.no_grad():
            return int(net(state).argmax())


class Returns:
    """Rewards, to show them."""

    def __init__(self):
        self.total, self.count = 0.0, 0

    def add(self, reward):
        self.total += reward
        self.count += 1

    @property
    def mean(self):
        return self.total / max(self.count, 1)


random.seed(0)
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 3))
target = copy.deepcopy(net)
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
environment, replay, greedy, returns = Pendulum(1), Replay(40), Greedy(), Returns()
checkpointer = Checkpointer()
checkpointer.track(net=net, target=target, optimizer=optimizer, environment=environment, replay=replay, greedy=greedy)
step = checkpointer.restore()
state = environment.observe() if step else environment.reset()
while step < 60:
    action = greedy(net, state)
    following, reward, done = environment.step(action)
    replay.push(state, action, reward, following)
    returns.add(reward)
    if len(replay) >= 8:
        states, actions, rewards, nexts = replay.sample(8)
        with torch.no_grad():
            wanted = rewards + 0.9 * target(nexts).max(1).values
        loss = nn.functional.mse_loss(net(states).gather(1, actions[:, None]).squeeze(1), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    step += 1
    if step % 10 == 0:
        target.load_state_dict(net.state_dict())
        print(step, returns.mean)
    state = environment.reset() if done else following
    checkpointer.step(step)
torch.save([net.state_dict(), target.state_dict(), len(replay), greedy.epsilon, environment.angle], "model.pt")
