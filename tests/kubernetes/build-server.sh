#!/bin/sh
# Builds kube-apiserver, kube-controller-manager and kube-scheduler 1.20 from Debian 12's source package into $1, once.
# Takes about 8 minutes of CPU time, 2 GB of disk while it builds, and root for Debian's packages (etcd too).
set -eu
cache=$1
[ -x "$cache/bin/kube-scheduler" ] && [ -x "$cache/bin/kube-apiserver" ] && [ -x "$cache/bin/kube-controller-manager" ] && exit 0
. /etc/os-release
[ "$VERSION_CODENAME" = bookworm ] || { echo "needs Debian 12 (its source package kubernetes); this is $VERSION_CODENAME" >&2; exit 1; }
mkdir -p "$cache/bin" "$cache/build" "$cache/lists/partial" "$cache/sources"
# rsync: without it make says "Permission denied". reflect2: the vendored 1.0.1 crashes with Go 1.18 and newer.
apt-get -qq install -y --no-install-recommends golang-1.19-go rsync make gcc libc6-dev dpkg-dev etcd-server \
  golang-github-modern-go-reflect2-dev
cd "$cache/build"
rm -rf kubernetes-*
# The sources of the mirrors that this machine uses.
cat /etc/apt/sources.list /etc/apt/sources.list.d/*.list 2>/dev/null | sed -n 's/^deb /deb-src /p' >"$cache/sources/some.list"
for file in /etc/apt/sources.list.d/*.sources; do
  [ ! -e "$file" ] || sed 's/^Types:.*/Types: deb-src/' "$file" >"$cache/sources/${file##*/}"
done
apt="-o Dir::Etc::SourceList=/dev/null -o Dir::Etc::SourceParts=$cache/sources -o Dir::State::Lists=$cache/lists"
apt-get -qq $apt update
apt-get -qq $apt source kubernetes
cd kubernetes-*/
rm -rf vendor/github.com/modern-go/reflect2
cp -r /usr/share/gocode/src/github.com/modern-go/reflect2 vendor/github.com/modern-go/reflect2
mkdir -p .go/src/k8s.io
ln -sfn ../../.. .go/src/k8s.io/kubernetes
export GOPATH=$PWD/.go GO111MODULE=off GOCACHE=$cache/go-build GOFLAGS="-p=1" PATH=/usr/lib/go-1.19/bin:$PATH
cd .go/src/k8s.io/kubernetes
nice -n 19 make WHAT="cmd/kube-apiserver cmd/kube-controller-manager cmd/kube-scheduler"
for program in kube-apiserver kube-controller-manager kube-scheduler; do
  cp _output/local/bin/linux/*/$program "$cache/bin/"
done
cd "$cache"
rm -rf "$cache/build" "$cache/go-build" "$cache/lists" "$cache/sources"
