"""A GAN: an endless iterator over the loader, noise from torch, two optimizers, an average of the generator."""

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

from mizzen import Checkpointer
from mizzen.integrations.torch import ResumableLoader

STEPS = 26


def forever(loader):
    while True:
        yield from loader


torch.manual_seed(4)
loader = ResumableLoader(TensorDataset(torch.randn(56, 4) * 2 + 1), batch_size=8, shuffle=True)
maker = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 4))
judge = nn.Sequential(nn.Linear(4, 16), nn.LeakyReLU(0.2), nn.Dropout(0.2), nn.Linear(16, 1))
maker_optimizer = torch.optim.Adam(maker.parameters(), lr=0.002, betas=(0.5, 0.999))
judge_optimizer = torch.optim.Adam(judge.parameters(), lr=0.002, betas=(0.5, 0.999))
average = AveragedModel(maker, multi_avg_fn=get_ema_multi_avg_fn(0.95))

checkpointer = Checkpointer()
checkpointer.track(
    maker=maker, judge=judge, maker_optimizer=maker_optimizer, judge_optimizer=judge_optimizer, average=average,
    loader=loader,
)  # fmt: skip
step = checkpointer.restore()
shown = torch.randn(5, 3)  # The same at each start.
batches = forever(loader)
while step < STEPS:
    (real,) = next(batches)
    fake = maker(torch.randn(len(real), 3))
    judge_optimizer.zero_grad()
    loss = nn.functional.softplus(-judge(real)).mean() + nn.functional.softplus(judge(fake.detach())).mean()
    loss.backward()
    judge_optimizer.step()
    maker_optimizer.zero_grad()
    nn.functional.softplus(-judge(fake)).mean().backward()
    maker_optimizer.step()
    average.update_parameters(maker)
    step += 1
    checkpointer.step(step)

torch.save([maker.state_dict(), judge.state_dict(), average.state_dict(), average(shown)], "model.pt")
