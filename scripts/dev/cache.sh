# The cache of built wheels, for build_horovod.sh. An installed wheel runs with the user's rights, so only the user may be
# able to put one there. Defines functions; tests/installation/test_cache.py calls them.

# Whether this user owns a file or folder, it is no link, and no one else can write to it.
private() { [ -O "$1" ] && [ ! -L "$1" ] && [ -z "$(find "$1" -maxdepth 0 -perm /022)" ]; }

# Makes the folder of the cache. What others could have written to is set aside: nothing in it is used.
open_cache() {
    local cache=$1
    mkdir -p "$(dirname "$cache")"
    mkdir -m 700 "$cache" 2>/dev/null || true
    private "$cache" && return
    [ -O "$cache" ] && [ ! -L "$cache" ] || {
        echo "the cache $cache belongs to another user or is a link: delete it, or set XDG_CACHE_HOME to a folder of your own" >&2
        return 1
    }
    local aside
    aside=$(mktemp -d "$cache.not-trusted.XXXXXX")
    mv "$cache" "$aside"
    mkdir -m 700 "$cache"
    echo "others could write to the cache $cache: what it held is now in $aside, and is not used" >&2
}

# Prints the path of the wheel in a folder of the cache. Fails if there is none that is whole and of this user.
cached_wheel() {
    local folder=$1 wheels
    [ -d "$folder" ] || return 1
    wheels=("$folder"/*.whl)
    [ ${#wheels[@]} = 1 ] && [ -f "${wheels[0]}" ] && [ -f "$folder/sha256" ] || return 1
    if ! { private "$folder" && private "${wheels[0]}" && private "$folder/sha256"; }; then
        echo "others could write to ${wheels[0]}: it is not used" >&2
        return 1
    fi
    if [ "$(digest "${wheels[0]}")" != "$(cat "$folder/sha256")" ]; then
        echo "${wheels[0]} is damaged: it is not used" >&2
        return 1
    fi
    echo "${wheels[0]}"
}

# Stores the digest of the only wheel in a folder, by which cached_wheel finds damage.
seal_wheel() { digest "$1"/*.whl >"$1/sha256"; }

digest() { sha256sum <"$1" | cut -c1-64; }
