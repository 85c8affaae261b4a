#!/bin/sh
# Tells Bazel the revision that jobs report; a changed tracked file makes it "-dirty".
revision=$(git rev-parse HEAD 2>/dev/null) || { echo STABLE_ATREX_REVISION unknown; exit 0; }
git diff --quiet HEAD 2>/dev/null || revision=$revision-dirty
echo "STABLE_ATREX_REVISION $revision"
