#!/bin/sh
# Fails if one of the given files needs a Python library, directly or not.
set -eu
for file in "$@"; do
  needed=$(ldd "$file")
  case $needed in
    *libc.so*) ;;
    *) echo "ldd says nothing about $file: $needed"; exit 1 ;;
  esac
  case $needed in
    *[Pp]ython*) echo "$file links Python: $needed"; exit 1 ;;
  esac
done
