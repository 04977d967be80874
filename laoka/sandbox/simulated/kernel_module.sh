#!/bin/sh
# The nvidia kernel module of a sandbox host, simulated: "loads" the nvidia.ko that is on disk for the simulated kernel by
# writing what the real one would show (/proc/driver/nvidia/version, the card's driver link), and takes it away again.
# It runs on the host as modprobe and rmmod, and beside it at each boot. Other modules are the real tools' business.
set -u
card=${CARD:-/srv/laoka-sandbox} root=${ROOT:-}
kernel=$(cat "$card/kernel" 2>/dev/null) || kernel=
devices=$card/sys/bus/pci/devices bound=$card/sys/bus/pci/drivers/nvidia

module() {
    for file in "$root/lib/modules/$kernel"/updates/dkms/nvidia.ko "$root/lib/modules/$kernel"/updates/dkms/nvidia-current.ko \
        "$root/lib/modules/$kernel"/kernel/nvidia-*/nvidia.ko; do
        [ -f "$file" ] && echo "$file" && return
    done
    return 1
}

field() { tr '\000' '\n' <"$2" | sed -n "s/^$1=//p" | head -n 1; }

# set_loaded 0|1: as laoka.sandbox.card, under the folder's lock and by rename. A module that is loaded forgets what was set on the
# card before: caps, clocks, persistence and compute mode are again the card's own, and a pending ECC mode is in force.
set_loaded() {
    (
        flock 9
        awk -F= -v loaded="$1" '
            NR == FNR { value[$1] = $2; next }
            /^driver_loaded=/ { $0 = "driver_loaded=" loaded }
            /^gpu[0-9]+\.(persistence|compute_mode)=/ { $0 = $1 "=0" }
            /^gpu[0-9]+\.power_limit_mw=/ { key = $1; sub(/limit/, "default", key); $0 = $1 "=" value[key] }
            /^gpu[0-9]+\.ecc_mode=/ { $0 = $1 "=" value[$1 "_pending"] }
            !/^gpu[0-9]+\.application_clock/ { print }
        ' "$card/gpu.conf" "$card/gpu.conf" >"$card/.gpu.conf.$$" && mv "$card/.gpu.conf.$$" "$card/gpu.conf"
    ) 9<"$card"
}

load() {
    [ ! -e "$card/proc/driver/nvidia/version" ] || return 0
    file=$(module) || {
        echo "modprobe: FATAL: Module nvidia not found in directory /lib/modules/$kernel" >&2
        return 1
    }
    if [ -e "$card/secure-boot" ] && ! grep -qa '~Module signature appended~' "$file"; then
        echo "modprobe: ERROR: could not insert 'nvidia': Key was rejected by service" >&2
        return 1
    fi
    version=$(field version "$file") words="x86_64 Kernel Module" drives=1
    case $(field license "$file") in *GPL*) words="Open Kernel Module for x86_64" drives=0 ;; esac
    [ "${version%%.*}" -le 580 ] || drives=0
    mkdir -p "$card/proc/driver/nvidia" "$bound"
    echo "NVRM version: NVIDIA UNIX $words  $version  (stand-in of laoka's sandbox)" >"$card/proc/driver/nvidia/version"
    up=0
    for device in "$devices"/*; do
        [ "$(cat "$device/vendor")" = 0x10de ] || continue
        rm -f "$device/driver" "$bound/${device##*/}"
        # Neither an open nor a newer module drives a V100, and none takes a card whose BAR1 was never assigned.
        [ "$drives" = 1 ] || continue
        case "$(sed -n 2p "$device/resource")" in 0x0000000000000000*) continue ;; esac
        ln -sfn ../../../drivers/nvidia "$device/driver"
        ln -sfn "../../devices/${device##*/}" "$bound/${device##*/}"
        up=1
    done
    [ "$drives" = 0 ] || set_loaded $up
}

unload() {
    [ -e "$card/proc/driver/nvidia/version" ] || return 0
    if [ -z "$root" ]; then
        for unit in qwen-serve nvidia-persistenced; do
            systemctl -q is-active $unit && held=$unit
        done
    fi
    if [ -n "${held:-}" ] || [ -e "$card/module-held" ]; then
        echo "rmmod: ERROR: Module nvidia is in use${held:+ by $held}" >&2
        return 1
    fi
    forget
    set_loaded 0
}

forget() {
    rm -rf "$card/proc/driver/nvidia" "$bound"
    for device in "$devices"/*; do
        [ "$(cat "$device/vendor")" != 0x10de ] || rm -f "$device/driver"
    done
}

case ${0##*/}:${1:-} in
modprobe:nvidia) load ;;
modprobe:nvidia-uvm | modprobe:nvidia_uvm | modprobe:nvidia-modeset | modprobe:nvidia_modeset) load ;;
modprobe:*) exec /sbin/modprobe "$@" ;;
rmmod:nvidia) unload ;;
rmmod:nvidia*) ;;
rmmod:*) exec /sbin/rmmod "$@" ;;
*:boot)
    forget
    load 2>/dev/null || true # a host without a module boots all the same
    ;;
*)
    echo "usage: kernel_module.sh boot, or by the names modprobe and rmmod" >&2
    exit 2
    ;;
esac
