#!/usr/bin/env bash
# Unpacks Debian's Bazel into a private prefix, for machines that reach Debian's packages but not Bazel's releases:
#   from_debian.sh PREFIX VERSION     then run PREFIX/bin/bazel
# apt verifies every package against Debian's archive keys. The system's apt state, /usr and /etc stay as they are,
# and no root is needed. An interrupted run leaves no PREFIX/bin/bazel and is started over by the next one.
set -euo pipefail

prefix=$1 version=$2
suite=forky # the suite that carries Bazel 7.7.1; Debian 12 itself has 4.2
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
root=$prefix/root state=$prefix/apt
lib=$root/usr/lib/x86_64-linux-gnu share=$root/usr/share/bazel

fail() { echo "from_debian.sh: $*" >&2; exit 1; }

for tool in apt-get dpkg-deb python3; do
  command -v "$tool" >/dev/null || fail "needs $tool; on a system without it put Bazel $version on PATH"
done
[[ -r $keyring ]] || fail "needs $keyring (package debian-archive-keyring)"
mirror=$(apt-get indextargets --format '$(REPO_URI)' | grep -m1 '/debian/\?$') ||
  fail "no Debian archive among this machine's apt sources"

rm -rf "$prefix"
mkdir -p "$prefix/bin" "$root" "$state"/{lists/partial,cache/archives/partial}
echo "deb [signed-by=$keyring] $mirror $suite main" >"$state/sources.list"
# What the host or nobody provides: apt's resolver takes these for installed and leaves them out.
for package in build-essential ca-certificates-java debconf default-jdk-headless libjs-jquery node-core-js \
  node-html5shiv python3 unzip util-linux zlib1g-dev; do
  printf 'Package: %s\nStatus: install ok installed\nVersion: 99:0\nArchitecture: amd64\n' "$package"
  printf 'Maintainer: host\nDescription: host\n\n'
done >"$state/status"
private_apt() {
  apt-get -o Dir::Etc::sourcelist="$state/sources.list" -o Dir::Etc::sourceparts=/dev/null \
    -o Dir::State="$state" -o Dir::State::lists="$state/lists" -o Dir::State::status="$state/status" \
    -o Dir::Cache="$state/cache" -o Debug::NoLocking=1 -o APT::Sandbox::User="$(id -un)" \
    -o APT::Install-Recommends=false -qq "$@"
}
private_apt update
# libblake3-0: Bazel's JNI library loads it, the package does not name it. patchelf: relocates the binaries below.
private_apt install --yes --download-only --no-remove \
  bazel-bootstrap default-jre-headless libblake3-0 patchelf >/dev/null
for deb in "$state"/cache/archives/*.deb; do dpkg-deb --extract "$deb" "$root"; done

# Absolute links point into the host's /; they mean the prefix.
while IFS= read -r link; do ln -sfn "$root$(readlink "$link")" "$link"; done < <(find "$root" -type l -lname '/*')
python3 "$(dirname "${BASH_SOURCE[0]}")/relocate_jars.py" "$root"
java=$(echo "$root"/usr/lib/jvm/java-[0-9][0-9]-openjdk-amd64)
loader=$lib/ld-linux-x86-64.so.2
for binary in "$root"/usr/bin/bazel "$root"/usr/libexec/x86_64-linux-gnu/bazel/* "$java"/bin/java "$java"/lib/jspawnhelper; do
  # These need a newer libc than Debian 12's, so they run with the prefix's own loader; so does patchelf itself.
  "$loader" --library-path "$lib" "$root/usr/bin/patchelf" \
    --set-interpreter "$loader" --force-rpath --set-rpath "$lib:$java/lib" "$binary"
done

# Debian's rule packages stand in for the registry; --config=offline in .bazelrc names the stub modules.
{
  for module in rules_{java,cc,license,python,proto}; do
    echo "common:offline --override_module=$module=$share/rules/${module#rules_}"
  done
  for module in platforms bazel_{features,skylib}; do
    echo "common:offline --override_module=$module=$share/tools/${module#bazel_}"
  done
  # The sandbox mounts its own temporary folder over the system's; this keeps a prefix that lies in there visible.
  echo "build --sandbox_add_mount_pair=$prefix"
  echo "common --config=offline"
} >"$prefix/bazelrc"
cat >"$prefix/bazel.new" <<SH
#!/bin/sh
exec "$root/usr/bin/bazel" --nosystem_rc --bazelrc="$prefix/bazelrc" --install_base="$share" --trust_install_base \\
  --server_javabase="$java" "\$@"
SH
chmod +x "$prefix/bazel.new"
found=$(cd / && "$prefix/bazel.new" --version)
[[ $found == "bazel $version"* ]] || fail "Debian $suite has '$found', .bazelversion asks for $version"
rm -rf "$state"
mv "$prefix/bazel.new" "$prefix/bin/bazel" # last: its presence says that the prefix is complete
