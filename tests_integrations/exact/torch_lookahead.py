"""An own optimizer with slow weights, an average with a warm-up, mixup with a generator of its own."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from mizzen import Checkpointer
from mizzen.integrations.torch import ResumableLoader


class Lookahead(torch.optim.Adam):
    def __init__(self, params, lr, k=5, alpha=0.5):
        super().__init__(params, lr=lr)
        self._k, self._alpha, self._n = k, alpha, 0
        self._slow = [p.detach().clone() for g in self.param_groups for p in g["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        out = super().step(closure)
        self._n += 1
        if self._n % self._k == 0:
            for s, p in zip(self._slow, (p for g in self.param_groups for p in g["params"])):
                s.data += self._alpha * (p.data - s.data)
                p.data.copy_(s.data)
        return out


class EMA:
    def __init__(self, model):
        self.shadow = {k: v.clone() for k, v in model.state_dict().items()}
        self.n = 0

    def update(self, model):
        self.n += 1
        d = min(0.9, (1 + self.n) / (10 + self.n))
        for k, v in model.state_dict().items():
            if v.is_floating_point():
                self.shadow[k].mul_(d).add_(v, alpha=1 - d)

    def state_dict(self):
        return {"shadow": self.shadow, "n": self.n}

    def load_state_dict(self, s):
        self.shadow, self.n = s["shadow"], s["n"]


torch.manual_seed(1)
x = torch.randn(60, 6)
y = (x.sum(1) > 0).long()
loader = ResumableLoader(TensorDataset(x, y), batch_size=8, shuffle=True, drop_last=True)
net = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.1), nn.Linear(12, 2))
opt = Lookahead(net.parameters(), 0.01)
ema = EMA(net)
mix = np.random.RandomState(5)
ck = Checkpointer()
ck.track(net=net, opt=opt, ema=ema, mix=mix, loader=loader)
step = ck.restore()
for _ in range(loader.epoch, 4):
    for a, b in loader:
        lam = float(mix.beta(0.4, 0.4))
        perm = torch.from_numpy(mix.permutation(len(a)))
        out = net(lam * a + (1 - lam) * a[perm])
        loss = lam * nn.functional.cross_entropy(out, b) + (1 - lam) * nn.functional.cross_entropy(out, b[perm])
        opt.zero_grad()
        loss.backward()
        opt.step()
        ema.update(net)
        step += 1
        ck.step(step)
torch.save([net.state_dict(), opt.state_dict(), ema.state_dict()], "model.pt")
