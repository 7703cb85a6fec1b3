"""A body that is trained from the third epoch on, by a line that only that epoch executes; an average held by alias."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from mizzen import Checkpointer
from mizzen.integrations.torch import ResumableLoader

torch.manual_seed(9)
dataset = TensorDataset(torch.randn(40, 6), torch.randint(0, 3, (40,)))
loader = ResumableLoader(dataset, batch_size=8, shuffle=True)
body = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU())
head = nn.Linear(8, 3)
model = nn.Sequential(body, nn.Dropout(0.1), head)
body.requires_grad_(False)
opt = torch.optim.AdamW(model.parameters(), 0.01)
shadow = {n: p.detach().clone() for n, p in model.named_parameters()}
bag = {"ema": shadow, "best": 9e9}
ck = Checkpointer()
ck.track(model=model, opt=opt, loader=loader, bag=bag)
step = ck.restore()
for epoch in range(loader.epoch, 5):
    if epoch == 2:
        body.requires_grad_(True)
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        with torch.no_grad():
            for n, p in model.named_parameters():
                shadow[n].mul_(0.9).add_(p, alpha=0.1)
        bag["best"] = min(bag["best"], loss.item())
        step += 1
        ck.step(step)
torch.save([model.state_dict(), opt.state_dict(), shadow, bag["best"]], "model.pt")
