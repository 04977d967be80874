#!/bin/sh
# laoka: the steps of a driver change on its host. Each may be killed at any point and run again.
#   sh steps.sh VERB ARGUMENT...            a step, in the foreground
#   sh steps.sh unit DEADLINE_S VERB ...    a step as a unit of its own: a lost connection or a killed run does not cut it off
# State lies in /var/lib/laoka/driver: debs (packages of now and of before), change (notes of a change that did not end),
# stopped (units that were stopped for it), previous, log.
set -u
folder=/var/lib/laoka/driver
debs=$folder/debs change=$folder/change stopped=$folder/stopped
export DEBIAN_FRONTEND=noninteractive NEEDRESTART_SUSPEND=1 LC_ALL=C

# What has the card open, or would complain while it is away.
watchers="qwen-watchdog.service nvidia-dcgm.service dcgm-exporter.service nvidia_gpu_exporter.service"
engines="qwen-serve.service qwen-serve@*.service"
holders="nvidia-persistenced.service laoka-power.service"

apt() {
    apt-get -q -y -o DPkg::Lock::Timeout=60 -o Dpkg::Options::=--force-confold -o "Dir::Cache::archives=$debs" \
        -o APT::Ignore-Hold=true --no-install-recommends --allow-downgrades --allow-change-held-packages "$@"
}

# Installed packages of the driver as NAME=VERSION; the names are those of `belongs` in laoka.stack.driver_target.
ours() {
    dpkg-query -W -f '${db:Status-Status} ${Package} ${Version}\n' | awk '
        $1 == "not-installed" || $1 == "config-files" || $2 ~ /^(lib)?nvidia-(container|cuda-(toolkit|dev|gdb))/ { next }
        $2 ~ /^((lib)?nvidia-|libcuda|linux-(modules|objects|signatures)-nvidia-|xserver-xorg-video-nvidia|firmware-nvidia-)/ {
            print $2 "=" $3
        }'
}

name_of() { dpkg-deb -W --showformat='${Package}=${Version}' "$1" 2>/dev/null; }

# have NAME=VERSION: whether its .deb lies in our folder, whole.
have() {
    for deb in "$debs"/"${1%%=*}"_*.deb; do
        [ -e "$deb" ] && [ "$(name_of "$deb")" = "$1" ] && return 0
    done
    return 1
}

store() {
    mkdir -p "$debs/partial" "$change.d" 2>/dev/null
    rmdir "$change.d" 2>/dev/null
    chown _apt "$debs/partial" 2>/dev/null
    cd "$debs" || exit 1
}

# The .deb of every installed driver package: from apt's cache, the archive, or packed again from its files (an archive drops
# versions, and a package repacked is as good for a way back). Fails when one can't be had.
keep() {
    store
    missing=0
    for package in $(ours); do
        have "$package" && continue
        file=$(echo "$package" | sed 's/=/_/; s/:/%3a/')
        cp /var/cache/apt/archives/"$file"_*.deb . 2>/dev/null
        have "$package" && continue
        apt-get -q download "$package" >/dev/null 2>&1
        have "$package" && continue
        command -v dpkg-repack >/dev/null || apt install dpkg-repack >/dev/null 2>&1
        dpkg-repack "${package%%=*}" >/dev/null 2>&1
        have "$package" && continue
        echo "no .deb of $package can be had: no archive has it any more, and dpkg-repack is not there" >&2
        missing=1
    done
    return $missing
}

# stage PACKAGE...: fetch all that the change and the way back need. Downloads are taken up where they stopped; packages out of a
# folder (file:) are copied too, so that the change itself needs no archive.
stage() {
    keep || return 1
    apt -o Acquire::Retries=3 --download-only install "$@" || return 1
    for package in $(apt -s install "$@" | sed -n 's/^Inst \([^ ]*\) .*(\([^ ]*\) .*/\1=\2/p'); do
        have "$package" || apt-get -q download "$package" || return 1
    done
}

# reserve BYTES: take room that only the way back uses, so that a change can't fill the disk up to where there is no way back.
reserve() {
    [ "$1" = 0 ] || [ -e "$change/reserve" ] && return
    # Asked first: to find out by writing would fill the disk of a host that serves.
    [ "$(df --output=avail -B1 "$change" | tail -n 1)" -gt "$1" ] && {
        fallocate -l "$1" "$change/reserve.new" 2>/dev/null || head -c "$1" /dev/zero >"$change/reserve.new"
    } || {
        rm -f "$change/reserve.new"
        echo "there is no room to keep for the way back: $1 bytes in $change" >&2
        return 1
    }
    mv "$change/reserve.new" "$change/reserve"
}

# begin BYTES KERNEL_PACKAGE...: reserve room, and note what is installed, and which packages of a kernel will come, unless a change
# that did not end noted it already: that is the way back.
begin() {
    mkdir -p "$change" && reserve "$1" || return 1
    shift
    [ -e "$change/before" ] && return
    uname -r >"$change/kernel" && printf '%s\n' "$@" >"$change/new-kernel" && ours >"$change/before.new" &&
        sync -f "$change/before.new" && mv "$change/before.new" "$change/before"
}

# drain URL DEADLINE_S: note the units that run, in the order in which they are started; stop the watchers; wait until the engine
# says that no request runs; stop the engines and what else has the card open. It fails before anything is stopped, or not at all.
drain() {
    if [ ! -s "$stopped" ]; then
        # shellcheck disable=SC2086 # the lists are words
        systemctl list-units --all --plain --no-legend --state=active,activating,reloading $watchers $engines $holders 2>/dev/null |
            awk '{ rank = 4 } /^nvidia-persistenced/ { rank = 1 } /^laoka-power/ { rank = 2 } /^qwen-serve/ { rank = 3 }
                { print rank, $1 }' | sort | cut -d ' ' -f 2 >"$stopped.new" && sync -f "$stopped.new" &&
            mv "$stopped.new" "$stopped" || return 1
    fi
    # shellcheck disable=SC2086
    systemctl stop $watchers 2>/dev/null
    end=$(($(date +%s) + $2))
    while curl -sf -m 5 "$1" | awk '/^vllm:num_requests_(running|waiting)/ { n += $NF } END { exit !(n > 0) }'; do
        [ "$(date +%s)" -lt $end ] || break
        sleep 1
    done
    # shellcheck disable=SC2086
    systemctl stop $engines $holders 2>/dev/null
    return 0
}

# Hold what belongs to the driver, and the kernels that have a module of it; apt's autoremove leaves both alone. Where all is held
# already, no lock of apt is needed.
hold() {
    names=$(ours | cut -d= -f1)
    for folder in /lib/modules/*/; do
        kernel=$(basename "$folder")
        modinfo -k "$kernel" nvidia >/dev/null 2>&1 || modinfo -k "$kernel" nvidia-current >/dev/null 2>&1 || continue
        names="$names $(dpkg-query -W -f '${db:Status-Status} ${Package}\n' "linux-*-$kernel" 2>/dev/null | sed -n 's/^installed //p' | tr '\n' ' ')"
    done
    [ -n "${names# }" ] || return 0
    # shellcheck disable=SC2086
    loose=$(printf '%s\n' $names | grep -vxF -e "$(apt-mark showhold)")
    # shellcheck disable=SC2086
    auto=$(apt-mark showauto $names)
    # shellcheck disable=SC2086
    { [ -z "$loose" ] || apt-mark -qq hold $loose; } && { [ -z "$auto" ] || apt-mark -qq manual $auto; }
}

# install FIRST... -- PACKAGE...: have dpkg end what it began, then install, and hold what belongs to the driver.
install() {
    dpkg --configure -a || true
    first=
    while [ "$1" != -- ]; do
        first="$first $1"
        shift
    done
    shift
    # shellcheck disable=SC2086
    [ -z "$first" ] || apt install $first || return 1
    apt install "$@" && hold
}

# Load the module; an old one is unloaded first. Status 3: it does not let go.
load() {
    if [ -e /proc/driver/nvidia/version ]; then
        for module in nvidia_uvm nvidia_drm nvidia_modeset nvidia_peermem nvidia; do
            rmmod $module || true
        done
        [ ! -e /proc/driver/nvidia/version ] || return 3
    fi
    modprobe nvidia
}

# Install what was there before and is no more, or not whole, from our folder and without any archive; remove what came since;
# hold it. The pins are left out: they speak of the wanted version.
undo() {
    # A dpkg that was cut off wants this before apt works again.
    ! ls /var/lib/dpkg/updates | grep -q '^[0-9]' || dpkg --configure -a
    cd "$debs" || return 1
    back= gone=$(cat "$change/new-kernel" 2>/dev/null | tr '\n' ' ')
    dpkg-query -W -f '${db:Status-Status} ${Package}=${Version}\n' | sed -n 's/^installed //p' >"$change/intact"
    for deb in *.deb; do
        [ -e "$deb" ] || continue
        name=$(name_of "$deb")
        grep -qxF "$name" "$change/before" && ! grep -qxF "$name" "$change/intact" && back="$back ./$deb"
    done
    for name in $(ours | cut -d= -f1); do
        grep -q "^$name=" "$change/before" || gone="$gone $name"
    done
    gone=$(for name in $gone; do
        case $(dpkg-query -W -f '${db:Status-Status}' "$name" 2>/dev/null) in "" | not-installed | config-files) ;; *) echo "$name" ;; esac
    done)
    if [ -n "$back$gone" ]; then
        # shellcheck disable=SC2086,SC2046
        apt -o Dir::Etc::SourceList=/dev/null -o Dir::Etc::SourceParts=/dev/null -o Dir::Etc::Preferences=/dev/null \
            -o Dir::Etc::PreferencesParts=/dev/null --reinstall install $back $(printf '%s- ' $gone | sed 's/^- $//') || {
            # What apt can't do without an archive, dpkg does from the same files.
            [ -z "$gone" ] || dpkg --force-depends --purge $gone
            [ -z "$back" ] || dpkg -i $back
        }
    fi
    ours | sort >"$change/after"
    sort "$change/before" | diff - "$change/after" && { [ -z "$(dpkg --audit)" ] || dpkg --configure -a; } && hold
}

# Start the units that were stopped: persistence, caps, engine, watchers; each start returns when its unit is up.
start() {
    systemctl daemon-reload
    failed=
    for unit in $(cat "$stopped" 2>/dev/null); do
        systemctl -q is-active "$unit" && continue
        systemctl reset-failed "$unit" 2>/dev/null
        systemctl start "$unit" || failed="$failed $unit"
    done
    [ -n "$failed" ] || return 0
    for unit in $failed; do journalctl -u "$unit" -n 10 --no-pager -o cat; done
    echo "E: not started:$failed"
    return 1
}

# finish NOTE: a change ended, well or undone. Packages of now and of before stay, a line goes into the log, the notes go.
finish() {
    keep || true
    [ ! -s "$change/before" ] || cp "$change/before" "$folder/previous"
    cd "$debs" && for deb in *.deb; do
        [ -e "$deb" ] || continue
        { ours; cat "$folder/previous" 2>/dev/null; } | grep -qxF "$(name_of "$deb")" || rm -f "$deb"
    done
    echo "$(date -u +%Y-%m-%dT%H:%M:%SZ) $1" >>"$folder/log"
    rm -f "$stopped"
    rm -rf "$change"
}

# boot ENTRY: make one exact entry the boot loader's default, in its settings, its menu and its saved entry.
boot() {
    file=/etc/default/grub.d/zz-laoka-kernel.cfg
    mkdir -p /etc/default/grub.d
    head="# laoka: the kernel that the driver's module is proven for; it moves by a deploy only. Do not edit: laoka rewrites it."
    printf '%s\n' "$head" "GRUB_DEFAULT='$1'" "GRUB_SAVEDEFAULT=false" >$file.new && mv $file.new $file &&
        update-grub 2>&1 && grub-set-default "$1" && sync
}

unit() {
    deadline=$1 step=$2 name=laoka-driver-change
    end=$(($(date +%s) + deadline))
    while systemctl -q is-active $name.service; do # of an earlier run
        [ "$(date +%s)" -lt $end ] || { echo "the step of an earlier run still runs" >&2; return 1; }
        sleep 1
    done
    mkdir -p "$change"
    rm -f "$change/$step.status"
    [ "$step" != undo ] || rm -f "$change/reserve"
    shift
    # Its words and its status go to files: they are read after, by whoever comes.
    systemd-run --quiet --collect --wait --unit=$name -p "RuntimeMaxSec=$deadline" \
        sh "$folder/steps.sh" noted "$@" || true
}

noted() {
    step=$1
    exec >"$change/$step.log" 2>&1
    ("$@")
    echo $? >"$change/$step.status.new"
    mv "$change/$step.status.new" "$change/$step.status"
}

"$@"
