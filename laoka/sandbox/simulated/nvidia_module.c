/* nvidia.ko of laoka's sandbox: an object file without code that modinfo reads; no kernel loads it.
 *
 * Build:  gcc -c -DDRIVER_VERSION='"580.173.02"' -DLICENSE='"NVIDIA"' -o nvidia.ko nvidia_module.c
 */
#define INFO(name, text) static const char name[] __attribute__((used, section(".modinfo"), aligned(1))) = text

INFO(version, "version=" DRIVER_VERSION);
INFO(license, "license=" LICENSE);
INFO(module_name, "name=nvidia");
INFO(description, "description=stand-in of laoka's sandbox, contains no NVIDIA software");
