"""Estimators of scikit-learn in mini-batches: a classifier, a network, clusters, a scaler and a dictionary."""

import numpy as np
import torch
from sklearn.cluster import MiniBatchKMeans
from sklearn.decomposition import MiniBatchDictionaryLearning
from sklearn.linear_model import SGDClassifier
from sklearn.neural_network import MLPClassifier
from sklearn.preprocessing import StandardScaler

from mizzen import Checkpointer

np.random.seed(1)
inputs = np.random.randn(240, 5)
labels = (inputs[:, 0] + 0.3 * np.random.randn(240) > 0).astype(int)
scaler = StandardScaler()
linear = SGDClassifier(loss="log_loss", eta0=0.1, average=True, random_state=np.random.RandomState(3))
network = MLPClassifier((8,), random_state=1, learning_rate_init=0.01)
clusters = MiniBatchKMeans(4, random_state=0, n_init=1)
dictionary = MiniBatchDictionaryLearning(3, random_state=0, batch_size=8)

checkpointer = Checkpointer()
checkpointer.track(scaler=scaler, linear=linear, network=network, clusters=clusters, dictionary=dictionary)
checkpointer.progress["best"] = 0.0
step = checkpointer.restore()
for epoch in range(step // 8, 4):
    order = np.random.default_rng(epoch).permutation(200)
    for i in range(step % 8, 8):
        rows = order[i * 25 : (i + 1) * 25]
        scaled = scaler.partial_fit(inputs[rows] + 0.05 * np.random.randn(25, 5)).transform(inputs[rows])
        linear.partial_fit(scaled, labels[rows], classes=[0, 1])
        network.partial_fit(scaled, labels[rows], classes=[0, 1])
        clusters.partial_fit(scaled)
        dictionary.partial_fit(scaled)
        best = max(checkpointer.progress["best"], linear.score(scaler.transform(inputs[200:]), labels[200:]))
        checkpointer.progress["best"] = best
        step += 1
        checkpointer.step(step)
arrays = [scaler.mean_, linear.coef_, *network.coefs_, clusters.cluster_centers_, dictionary.components_]
torch.save([*map(torch.tensor, arrays), network.loss_curve_, checkpointer.progress["best"]], "model.pt")
